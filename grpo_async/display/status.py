"""`grpo-async status`: what a run said last in status.json, whether its launcher is still alive; and watching it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from grpo_async.display.dashboard import dashboard, server_text
from grpo_async.display.display import print_line
from grpo_async.display.progress import (
    Checkpoints,
    Example,
    LastPush,
    Progress,
    RunMessage,
    ago,
    evaluations_text,
    join,
    step_line,
)
from grpo_async.display.status_file import VERSION
from grpo_async.errors import ConfigError, RunError
from grpo_async.findings import Evidence, Finding, Severity, Verdict, judge
from grpo_async.findings.evidence import new_metrics
from grpo_async.records import LEDGER_STATUSES
from grpo_async.run_directory import RunDir
from grpo_async.utils.console import print_rows
from grpo_async.utils.growing_file import GrowingFile
from grpo_async.utils.json_files import read_object
from grpo_async.utils.run_state import FAILED, FINISHED, KILLED, RUNNING, SILENT, STOPPED, state_of
from grpo_async.utils.safe_text import one_line
from grpo_async.utils.text import duration, finite

EXIT_CODES: Mapping[str, int] = {RUNNING: 0, FINISHED: 0, FAILED: 1, STOPPED: 3, KILLED: 4, SILENT: 4}
"""Of `grpo-async status`; 2 is a run that does not exist."""

WATCH_INTERVAL_S = 1.0

_TOKENS = {
    "perf/generated_tokens_per_s": "{:.0f} generated",
    "perf/trained_tokens_per_s": "{:.0f} trained",
}
"""The metric, whose last part is its name in summary.json, and how it is written."""
_IDLE = {
    "pipeline/trainer_idle_ratio": "trainer {:.0%}",
    "pipeline/generator_idle_ratio": "servers {:.0%}",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """`content` is what status.json holds. `state` is that of the file, or where it says running and that cannot be: killed or
    silent (see `run_state`)."""

    state: str
    content: Mapping[str, Any]
    why: str = ""
    """What speaks against the file."""

    means: Mapping[str, Any] = field(default_factory=dict)
    """summary.json of a run that came to its end: means of the whole attempt. Empty where there is none."""

    run_dir: RunDir | None = None
    """None: status.json is all there is."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]

    def learning(self) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Whether it learns (the fields of `Verdict`), by the run's files as they are now, and what of them cannot be read; empty
        where there are none."""
        if self.run_dir is None:
            return self.content.get("learning") or {}, ()
        evidence = Evidence.read(self.run_dir)
        return judge(evidence).as_dict(), evidence.problems

    def as_json(self) -> dict[str, Any]:
        """The file's content, with `state` as it is, `why`, and `learning` and `problems` (of the run's files) as of now."""
        learning, problems = self.learning()
        now = {"state": self.state, "why": self.why or None, "learning": learning or None, "problems": list(problems)}
        return {**self.content, **now}


def newest_run(runs: Path) -> RunDir:
    """The run directory below `runs` that said something last.

    Raises:
        ConfigError: there is none.
    """
    written = []
    for path in runs.glob("*"):
        with contextlib.suppress(OSError):  # it has none, or was removed meanwhile
            written.append((RunDir(path).status.stat().st_mtime, path))
    if not written:
        raise ConfigError(
            f"{runs} holds no run with a status; name a run directory, or start one: grpo-async train CONFIG"
        )
    return RunDir(max(written)[1])


def read_status(run_dir: RunDir, *, now: float | None = None) -> RunStatus:
    """Raises ConfigError where there is no status.json, RunError where it is something else."""
    if not run_dir.status.exists():
        raise ConfigError(f"{run_dir.root} has no status.json: nothing was trained there, or by an earlier version")
    problems: list[str] = []
    content = read_object(run_dir.status, problems)
    if content.get("version") != VERSION or content.get("state") not in EXIT_CODES:
        why = f": {problems[0]}" if problems else ""
        raise RunError(f"{run_dir.status} is not a status of this version (layout {VERSION}){why}")
    found = state_of(content, now=now)
    # after a failure it is of an earlier attempt
    means = read_object(run_dir.summary, []) if found.state in (FINISHED, STOPPED) else {}
    return RunStatus(state=found.state, content=content, why=found.why, means=means, run_dir=run_dir)


def print_status(console: Console, status: RunStatus) -> None:
    """For people; everything in it is text that no terminal obeys."""
    color = {RUNNING: "green", FINISHED: "green", STOPPED: "yellow"}.get(status.state, "bold red")
    rows = _rows(status, time.time())
    print_rows(console, ((name, Text(one_line(text), style=color if name == "state" else "")) for name, text in rows))


def _rows(status: RunStatus, now: float) -> Iterator[tuple[str, str]]:
    content = status.content
    progress, is_running = progress_of(content), status.state == RUNNING
    eta, updated = content.get("eta_s"), float(content.get("updated_at", 0.0))
    took = duration(max(0, round((now if is_running else updated) - float(content.get("started_at", now)))))
    yield "run", f"{content.get('run')}  ({content.get('directory')})"
    yield "state", join([status.state, status.why, progress.phase if is_running else None])
    yield "error", str(content.get("error") or "")
    yield "precision", str(content.get("precision") or "")
    fraction = f"  {progress.step / progress.max_steps:.0%}" if progress.max_steps else ""
    yield "step", f"{progress.step}/{progress.max_steps}{fraction}"
    if is_running:
        left = f"{duration(round(eta))} left" if isinstance(eta, int | float) else None
        yield "time", join([f"{took} since the start", left, progress.text("step_time", "{:.1f} s/step")])
    else:
        yield "time", join([f"took {took}", progress.text("step_time", "the last step {:.1f} s")])
    reward = content.get("reward") or {}
    known = [f"{name} {reward[name]:.3f}" for name in ("last", "average") if isinstance(reward.get(name), int | float)]
    yield "reward", join([*known, "(all groups of a step)"]) if known else ""
    yield "tokens/s", _means(status, progress, _TOKENS)
    yield "idle", _means(status, progress, _IDLE)
    groups = (content.get("ledger") or {}).get("groups") or {}
    yield "groups", join(f"{state.replace('_', ' ')} {groups[state]}" for state in LEDGER_STATUSES if state in groups)
    for server in progress.servers if is_running else ():
        yield f"server {server.index}", server_text(server, has_host=True).plain
    yield "checkpoint", "none" if progress.checkpoints.step is None else f"step {progress.checkpoints.step}"
    yield "held out", evaluations_text(progress)
    learning, problems = status.learning()
    yield "learning", _text_of(learning)
    yield "problem", join(problems, "; ")
    yield "advice", _text_of(content.get("advice"))
    yield "warning", _text_of(content.get("last_warning"))
    last = "ended" if status.state in (FINISHED, STOPPED, FAILED) else "last update"
    yield "launcher", f"{_launcher(status)}, {last} {ago(updated, now)}"


def progress_of(content: Mapping[str, Any], *, now: float | None = None) -> Progress:
    """What the displays go by, from status.json; without the curves and without older messages."""
    now = time.time() if now is None else now
    progress = Progress(max_steps=int(content.get("max_steps", 0)), step=int(content.get("step", 0)))
    progress.phase = one_line(str(content.get("phase", "")))
    progress.metrics = dict(content.get("metrics") or {})
    progress.set_servers(content.get("servers") or [])
    progress.evaluations = {str(when): dict(values) for when, values in (content.get("evaluations") or {}).items()}
    progress.started = time.monotonic() - max(0.0, now - float(content.get("started_at", now)))
    left = progress.max_steps - progress.step
    if isinstance(eta := content.get("eta_s"), int | float) and left > 0:
        progress.step_times.append(eta / left)
    if example := content.get("example"):
        progress.example = Example.of(example)
    if push := content.get("last_push"):
        progress.push = LastPush(**push)
    progress.checkpoints = Checkpoints(**(content.get("checkpoint") or {}))
    if advice := content.get("advice"):
        progress.advice_step = int(advice.get("step", 0))
        changed = {name: advice.get(name) for name in ("text", "setting", "current", "suggested")}
        progress.advice = Finding(key=advice["bound_by"], severity=Severity.NOTE, title="", **changed)
    if learning := content.get("learning"):
        progress.verdict = Verdict(**learning)
    if warning := content.get("last_warning"):
        message = RunMessage(at=float(warning["at"]), text=one_line(str(warning["text"])), is_warning=True)
        progress.messages.append(message)
    return progress


def _means(status: RunStatus, progress: Progress, metrics: Mapping[str, str]) -> str:
    """Of the newest step during the run; after it the means of the whole run, or else those of the last step, named so."""
    newest = join(progress.text(metric, form) for metric, form in metrics.items())
    if status.state == RUNNING:
        return newest
    known = ((form, finite(status.means.get(metric.rpartition("/")[2]))) for metric, form in metrics.items())
    means = [form.format(value) for form, value in known if value is not None]
    if means:
        return join([*means, "(mean of the run)"])
    return join([newest, "(in the last step)"]) if newest else ""


def _text_of(content: Any) -> str:
    return str(content.get("text", "")) if isinstance(content, Mapping) else ""


def _launcher(status: RunStatus) -> str:
    return f"pid {status.content.get('pid')} on {status.content.get('host')}"


class MetricsTail:
    """What metrics.jsonl says, as curves and last rewards; starts over when a resume has truncated the file."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path, self._forget)
        self._forget()

    def read(self) -> None:
        """Read the new lines; a line that is not whole yet is read the next time."""
        for metrics in new_metrics(self._file):
            self.progress.add_past_step(metrics)

    def _forget(self) -> None:
        self.progress = Progress(max_steps=0)


def watch(run_dir: RunDir, console: Console) -> RunStatus:
    """Show the run until it has ended (or Ctrl-C); returns what was said last. Without a terminal: one line per step.

    Raises:
        ConfigError, RunError: there is no status to be read.
    """
    tail, status, pause = MetricsTail(run_dir.metrics), read_status(run_dir), threading.Event()
    shown = (-1, "")
    with contextlib.ExitStack() as stack:
        live = None
        if console.is_terminal and not console.is_dumb_terminal:
            live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False, transient=True))
        try:
            while True:  # until the run ends, or Ctrl-C
                status = read_status(run_dir)
                if live is not None:
                    tail.read()
                    live.update(_picture(status, tail, console), refresh=True)
                else:
                    shown = _print_news(status, shown, console)
                if status.state != RUNNING:
                    return status
                pause.wait(WATCH_INTERVAL_S)  # a file of another process: there is no event to wait for
        except KeyboardInterrupt:
            return status


def _picture(status: RunStatus, tail: MetricsTail, console: Console) -> RenderableType:
    progress = progress_of(status.content)
    progress.curves, progress.rewards = tail.progress.curves, tail.progress.rewards
    width, height = console.size
    footer = f"{_launcher(status)} · Ctrl-C leaves, the run continues"
    return dashboard(progress, run_name=str(status.content.get("run", "")), footer=footer, width=width, height=height)


def _print_news(status: RunStatus, shown: tuple[int, str], console: Console) -> tuple[int, str]:
    progress = progress_of(status.content)
    if progress.phase != shown[1]:
        print_line(console, progress.phase)
    elif progress.step > max(0, shown[0]):
        print_line(console, step_line(progress))
    return progress.step, progress.phase
