"""What the user sees of a run while it is running.

    supervisor -> Display (keeps Progress) -> views: LineView | LiveView | JsonView, StatusFile, the launcher's Advisor

Every view gets the same events, by name; what it knows beyond them is in the Progress that all of them share, so that status.json
is the same with each of them. No text can move the cursor: some of it quotes models and tools.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from grpo_async.checks.report import Check, counts, print_checks
from grpo_async.display.dashboard import dashboard
from grpo_async.display.progress import Example, Progress, evaluation_line, example_lines, step_line
from grpo_async.findings import Finding, Verdict
from grpo_async.findings.evidence import MetricsReader
from grpo_async.run_directory import RunDir
from grpo_async.utils.files import json_safe
from grpo_async.utils.safe_text import plain
from grpo_async.utils.text import clipped

_INTERVAL_S = 1.0
_MIN_INTERVAL_S = 0.25
_END_TIMEOUT_S = 5.0


class View(AbstractContextManager[Any]):
    """Shows or keeps events. Open while the run is running."""

    def __exit__(self, *error: Any) -> None:
        pass

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        """An event and its fields, as `events.JSON_EVENTS` lists them. `Progress` has it already; its lock is not held."""


class Display:
    """What the supervisor tells, as it happens. Open while used as a context manager. Any thread may call."""

    def __init__(self, progress: Progress, views: Sequence[View] = ()) -> None:
        self.progress = progress
        self.views = list(views)
        self._open = ExitStack()

    def __enter__(self) -> Self:
        for view in self.views:
            self._open.enter_context(view)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.__exit__(*error)

    def phase(self, name: str) -> None:
        """What the trainer does now."""
        with self.progress.lock:
            self.progress.phase = plain(name)
        self._show("phase", name=name)

    def step(self, step: int, max_steps: int, metrics: Mapping[str, float]) -> None:
        """An optimizer step has ended."""
        with self.progress.lock:
            self.progress.add_step(step, max_steps, metrics)
            eta_s = self.progress.seconds_left
        self._show("step", step=step, max_steps=max_steps, eta_s=eta_s, metrics=dict(metrics))

    def example(self, example: Example) -> None:
        """What the policy wrote in a step, good and bad."""
        with self.progress.lock:
            self.progress.example = example
        self._show("example", **example.as_dict())

    def evaluation(self, when: str, metrics: Mapping[str, float]) -> None:
        """Held-out results; `when` is before, after or "step 20"."""
        with self.progress.lock:
            self.progress.evaluations[when] = dict(metrics)
            self.progress.add_message(evaluation_line(when, metrics))
        self._show("evaluation", when=when, metrics=dict(metrics))

    def preflight(self, checks: Sequence[Check]) -> None:
        """What the checks before the first step found."""
        with self.progress.lock:
            self.progress.add_message(f"preflight: {counts(checks)}")
            for text in _not_passed(checks):
                self.progress.add_message(text, is_warning=True)
        self._show("preflight", checks=list(checks))

    def servers(self, servers: Sequence[Mapping[str, Any]]) -> None:
        """State and load of every server, about every other second; see progress.ServerStatus."""
        with self.progress.lock:
            self.progress.set_servers(servers)
        self._show("servers", servers=[dict(server) for server in servers])

    def advice(self, step: int, advice: Finding) -> None:
        """What bounds the run, and what to change."""
        with self.progress.lock:
            self.progress.advice, self.progress.advice_step = advice, step
        self._show("advice", step=step, **advice.as_advice())

    def learning(self, verdict: Verdict) -> None:
        """Whether it learns, by all that is known until now."""
        with self.progress.lock:
            self.progress.verdict = verdict
        self._show("learning", **verdict.as_dict())

    def note(self, text: str) -> None:
        """Something worth its own line."""
        with self.progress.lock:
            self.progress.add_message(text)
        self._show("note", text=text)

    def warning(self, text: str) -> None:
        """A problem that does not stop the run."""
        with self.progress.lock:
            self.progress.add_message(text, is_warning=True)
        self._show("warning", text=text)

    def unknown_message(self, sender: str, message: Mapping[str, Any]) -> None:
        """Warn of a message that another process has sent and this one does not know."""
        self.warning(f"{sender} sent an unknown message: {clipped(str(dict(message)), 200)}")

    def _show(self, event: str, **fields: Any) -> None:
        for view in self.views:
            view.show(event, fields)


class LineView(View):
    """One line per event: for pipes, files, and CI. `quiet`: only warnings, and checks that did not pass."""

    def __init__(self, console: Console, progress: Progress, *, logs: Path, quiet: bool = False) -> None:
        self._console = console
        self._progress = progress
        self._logs = logs
        self._quiet = quiet

    def __enter__(self) -> Self:
        if not self._quiet:
            print_line(self._console, f"logs: {self._logs}")
        return self

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        match event:
            case "warning":
                print_line(self._console, f"warning: {fields['text']}")
            case "preflight" if self._quiet:
                for text in _not_passed(fields["checks"]):
                    print_line(self._console, text)
            case _ if self._quiet:
                pass
            case "preflight":
                checks = [
                    replace(check, name=plain(check.name), detail=plain(check.detail)) for check in fields["checks"]
                ]
                print_checks(self._console, checks, title="Preflight")
                self._console.file.flush()
            case "phase":
                print_line(self._console, fields["name"])
            case "step":
                print_line(self._console, step_line(self._progress))
            case "example":
                for line in example_lines(Example.of(fields)):
                    print_line(self._console, line)
            case "evaluation":
                print_line(self._console, evaluation_line(fields["when"], fields["metrics"]))
            case "note":
                print_line(self._console, fields["text"])
            case "advice" | "learning":
                print_line(self._console, f"{event}: {fields['text']}")


def _not_passed(checks: Sequence[Check]) -> list[str]:
    return [f"preflight: {check.status}: {check.name}: {check.detail}" for check in checks if check.status != "pass"]


class JsonView(View):
    """`--json-logs`: every event is a JSON object on a line of its own, flushed; any thread may write. The
    `servers` event is written only when the state of a server changes, not with every number of their load."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._states: list[tuple[Any, ...]] = []

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        """Numbers that JSON does not have become null."""
        if event == "servers":
            states = [tuple(map(server.get, ("index", "state", "restarts"))) for server in fields["servers"]]
            if states == self._states:
                return
            self._states = states
        if event == "preflight":
            fields = {"checks": [asdict(check) for check in fields["checks"]]}
        line = json.dumps({"time": round(time.time(), 3), "event": event, **json_safe(fields)}, default=str)
        self._file.write(line + "\n")
        self._file.flush()


class LiveView(View):
    """The dashboard on a terminal: the whole screen during the run, and its messages below each other afterward.

    Drawn by its own thread, on every event (at most four times a second) and every second; nothing of the run waits for a slow
    terminal. The size is asked for each picture, so a resized window is right again within a second.

    The curves are read from the run directory.
    """

    def __init__(self, console: Console, progress: Progress, *, run_name: str, run_dir: RunDir) -> None:
        self._console = console
        self._progress = progress
        self._run_name = run_name
        self._footer = f"logs: {run_dir.latest_logs} · Ctrl-C saves and stops"
        self._log = MetricsReader(run_dir.metrics)
        self._live = Live(console=console, screen=True, auto_refresh=False, transient=True)
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="dashboard", daemon=True)

    def __enter__(self) -> Self:
        self._live.start()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ended.set()
        self._changed.set()
        self._thread.join(_END_TIMEOUT_S)
        self._live.stop()
        progress = self._progress
        for message in list(progress.messages):  # the screen that had them is gone; an output lost here adds one
            print_line(self._console, f"warning: {message.text}" if message.is_warning else message.text)
        if progress.verdict is not None:
            print_line(self._console, f"learning: {progress.verdict.text}")
        if progress.advice is not None:
            print_line(self._console, f"advice at step {progress.advice_step}: {progress.advice.text}")

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        self._changed.set()

    def _draw(self) -> None:
        while not self._ended.is_set():  # leaving the context ends it; a daemon thread
            self._changed.clear()
            width, height = self._console.size
            rows = self._log.rows()
            with self._progress.lock:
                past = self._progress.past(rows.values())
                picture = dashboard(
                    self._progress, past, run_name=self._run_name, footer=self._footer, width=width, height=height
                )
            try:
                self._live.update(picture, refresh=True)
            except OSError:  # the terminal is gone; the run is not
                return
            drawn = time.monotonic()
            self._changed.wait(_INTERVAL_S)
            self._ended.wait(max(0.0, _MIN_INTERVAL_S - (time.monotonic() - drawn)))


def print_line(console: Console, text: str) -> None:
    """One line, whatever its length, for grep."""
    console.print(Text(plain(text)), soft_wrap=True)
    console.file.flush()
