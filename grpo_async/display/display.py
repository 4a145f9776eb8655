"""What the user sees of a run while it is running, and status.json, which others see.

    supervisor -> Display (keeps Progress) -> views: LineView | LiveView | JsonView, StatusFile, ...

Every view gets the same events (`events.JSON_EVENTS`), whose fields are as in JSON. No text can move
the cursor: some quotes models and tools.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from typing import Any, Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from grpo_async.checks.report import Check, counts, print_checks
from grpo_async.display.progress import Progress
from grpo_async.display.render import evaluation_line, example_lines, failed_checks, screen, step_line
from grpo_async.errors import message_of
from grpo_async.utils.files import json_safe, write_atomically
from grpo_async.utils.run_state import FAILED
from grpo_async.utils.safe_text import plain

_INTERVAL_S, _MIN_INTERVAL_S = 1.0, 0.25  # of pictures and of status.json
_END_TIMEOUT_S = 10.0
_SILENCE_S, _MAX_SILENCE_S = 5.0, 60.0
"""After so long without a line one says what the run is doing; doubled each time, to the second."""


class View(AbstractContextManager[Any]):
    """Shows or keeps events. Open while the run is running."""

    def __exit__(self, *error: Any) -> None:
        pass

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        """An event and its fields. `Progress` has it already."""

    def tick(self) -> None:
        """Called after each event, and every second without one (InThread)."""


class Display:
    """What the supervisor tells, as it happens. Open while used as a context manager. Any thread
    may call."""

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

    def show(self, event: str, **fields: Any) -> None:
        """Tell an event."""
        if event == "preflight":
            fields["counts"] = counts([Check(**check) for check in fields["checks"]])
        self.progress.add(event, fields)
        if event == "step":
            fields |= {"eta_s": self.progress.eta_s, "reward_change": self.progress.reward_change}
        for view in self.views:
            view.show(event, fields)

    def phase(self, name: str) -> None:
        """What the run does now; `name` may say how far it is: "evaluating: 3 of 8 prompts"."""
        self.show("phase", name=name)

    def note(self, text: str) -> None:
        """Something worth its own line."""
        self.show("note", text=text)

    def warning(self, text: str) -> None:
        """A problem that does not stop the run."""
        self.show("warning", text=text)


class InThread(View):
    """Passes events on to a view in a thread of its own: the run does not wait for a terminal or a pipe that takes nothing
    (Ctrl-S, `| less`, a connection that hangs)."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._events: queue.SimpleQueue[tuple[str, Mapping[str, Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._pass_on, name="view", daemon=True)

    def __enter__(self) -> Self:
        self.view.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._events.put(None)
        self._thread.join(_END_TIMEOUT_S)
        self.view.__exit__(*error)

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        self._events.put((event, fields))

    def drain(self) -> None:
        """Wait, after the context, until everything has been passed on, however long nobody reads."""
        while self._thread.is_alive():  # as printing itself would wait
            self._thread.join(_END_TIMEOUT_S)

    def _pass_on(self) -> None:
        while True:  # leaving the context ends it; a daemon thread
            try:
                item = self._events.get(timeout=_INTERVAL_S)
            except queue.Empty:
                pass
            else:
                if item is None:
                    return
                self.view.show(*item)
            self.view.tick()


class _Periodic(View):
    """Acts in a thread of its own, on every event (at most four times a second) and every second:
    the run waits neither for a slow terminal nor for a slow disk."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._changed = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep_acting, name=type(self).__name__, daemon=True)

    def __enter__(self) -> Self:
        self._act()
        self._thread.start()
        return self

    def __exit__(self, *error: Any) -> None:
        self._ended.set()
        self._changed.set()
        if self._thread.is_alive():
            self._thread.join(_END_TIMEOUT_S)

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        self._changed.set()

    def _act(self) -> None:
        raise NotImplementedError

    def _keep_acting(self) -> None:
        while not self._ended.wait(_MIN_INTERVAL_S):  # leaving the context ends it; a daemon thread
            self._changed.wait(_INTERVAL_S)
            self._changed.clear()
            if not self._ended.is_set():
                self._act()


class StatusFile(_Periodic):
    """status.json: where a run stands, replaced as a whole. A launcher that is killed leaves `state:
    running`: who reads it compares `pid` and `pid_started_at` (see `run_state`). `end` says how the
    run went; an exception that leaves the context does too."""

    def __exit__(self, *error: Any) -> None:
        if error[1] is not None:
            self._progress.end(FAILED, exit_code=1, error=message_of(error[1]))
        super().__exit__(*error)
        self._act()

    def end(self, state: str, *, exit_code: int, error: str | None) -> None:
        """Say how the run went; the first call wins."""
        self._progress.end(state, exit_code=exit_code, error=error)
        if self._ended.is_set():
            self._act()

    def _act(self) -> None:
        text = json.dumps(json_safe(self._progress.content()), indent=1)
        with suppress(OSError):  # a full disk ends the run elsewhere, with better words
            write_atomically(self._progress.run_dir.status, text)


class LineView(View):
    """One line for each event, for pipes, files and CI; after a silence, one that says what the
    run is doing. `quiet`: only warnings, and checks that did not pass."""

    def __init__(self, console: Console, progress: Progress, *, quiet: bool = False) -> None:
        self._progress = progress
        self._console = console
        self._quiet = quiet
        self._said_at = time.monotonic()
        self._silence_s = _SILENCE_S
        self._phase = ""

    def __enter__(self) -> Self:
        if not self._quiet:
            print_line(self._console, f"logs: {self._progress.run_dir.latest_logs}")
        return self

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        lines = self._lines(event, fields)
        if event == "preflight" and not self._quiet:
            checks = [Check(plain(each["name"]), each["status"], plain(each["detail"])) for each in fields["checks"]]
            print_checks(self._console, checks, title="Preflight")
            self._console.file.flush()
        for line in lines:
            print_line(self._console, line)
        if lines:
            self._said_at = time.monotonic()

    def _lines(self, event: str, fields: Mapping[str, Any]) -> list[str]:
        match event:
            case "warning":
                return [f"warning: {fields['text']}"]
            case "preflight" if self._quiet:
                return failed_checks(fields["checks"])
            case _ if self._quiet:
                return []
            case "phase":
                phase = fields["name"].partition(":")[0]
                is_new, self._phase = phase != self._phase, phase
                if is_new:
                    self._silence_s = _SILENCE_S
                return [fields["name"]] if is_new else []
            case "step":
                step, most, metrics = (fields[name] for name in ("step", "max_steps", "metrics"))
                return [step_line(step, most, metrics, change=fields["reward_change"], left_s=fields["eta_s"])]
            case "example":
                return example_lines(self._progress.content()["example"])
            case "evaluation":
                return [evaluation_line(fields["when"], fields["metrics"])]
            case "note":
                return [fields["text"]]
            case "learning":
                return [f"{name}: {fields[key]}" for name, key in _DIAGNOSIS if fields[key]]
        return []

    def tick(self) -> None:
        """Break a silence."""
        if not self._quiet and time.monotonic() - self._said_at >= max(
            self._silence_s, 2.0 * (self._progress.step_s or 0.0)
        ):
            print_line(self._console, self._progress.now())
            self._said_at = time.monotonic()
            self._silence_s = min(2.0 * self._silence_s, _MAX_SILENCE_S)


_DIAGNOSIS = (("learning", "text"), ("to do", "fix"))


class JsonView(View):
    """`--json-logs`: every event is a JSON object on a line of its own, flushed; any thread may
    write. The `servers` event is written only when the state of a server changes."""

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
        content = {"time": round(time.time(), 3), "event": event, **json_safe(fields)}
        self._file.write(json.dumps(content, default=str) + "\n")
        self._file.flush()


class LiveView(_Periodic):
    """The dashboard on a terminal: the whole screen during the run, and its messages afterward."""

    def __init__(self, console: Console, progress: Progress) -> None:
        super().__init__(progress)
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False, transient=True)

    def __enter__(self) -> Self:
        self._live.start()
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._live.stop()
        for message in list(self._progress.messages):  # the screen that had them is gone
            print_line(self._console, message)

    def _act(self) -> None:
        footer = f"logs: {self._progress.run_dir.latest_logs} · Ctrl-C saves and stops"
        try:
            self._live.update(screen(self._progress.content(), self._console.size, footer=footer), refresh=True)
        except OSError:  # the terminal is gone; the run is not
            self._ended.set()


def print_line(console: Console, text: str) -> None:
    """Print one line, whatever its length, for grep."""
    console.print(Text(plain(text)), soft_wrap=True)
    console.file.flush()
