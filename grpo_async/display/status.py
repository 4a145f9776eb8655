"""`grpo-async status`: shows what status.json says and whether the launcher still runs, once or until the run has ended."""

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
from grpo_async.display.progress import Progress, RunRow, ago, join, left_text, run_rows, step_line, steps_text
from grpo_async.display.status_file import VERSION
from grpo_async.display.summary import summary_rows
from grpo_async.errors import ConfigError, RunError
from grpo_async.findings import Evidence, MetricRow, judge
from grpo_async.findings.evidence import MetricsReader
from grpo_async.run_directory import RunDir
from grpo_async.utils.console import print_rows
from grpo_async.utils.files import read_object
from grpo_async.utils.run_state import FAILED, FINISHED, KILLED, LEVELS, RUNNING, SILENT, STOPPED, state_of
from grpo_async.utils.safe_text import one_line
from grpo_async.utils.text import duration
from grpo_async.viewer.runs import runs_below

EXIT_CODES: Mapping[str, int] = {RUNNING: 0, FINISHED: 0, FAILED: 1, STOPPED: 3, KILLED: 4, SILENT: 4}
"""Exit codes of `grpo-async status`; 2 is a run that does not exist."""

WATCH_INTERVAL_S = 1.0

_COLORS = {"good": "green", "info": "green", "warning": "yellow", "bad": "bold red"}
_MAX_EXAMPLE = 160  # characters of a prompt or a completion


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """`content` is what status.json holds. `state` is that of the file, or where it says running and that cannot be: killed or
    silent (see `run_state`)."""

    run_dir: RunDir
    state: str
    content: Mapping[str, Any]
    why: str = ""
    """Why the file's own state is not believed."""

    summary: Mapping[str, Any] = field(default_factory=dict)
    """summary.json of a run that came to its end. Empty where there is none."""

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.state]

    def learning(self) -> tuple[Mapping[str, Any], Sequence[str]]:
        """Whether it learns (the fields of `Verdict`), by the run's files as they are now, and what is wrong with those."""
        evidence = Evidence.read(self.run_dir)
        return judge(evidence).as_dict(), evidence.problems

    def as_json(self) -> dict[str, Any]:
        """The file's content, with `state` as it is, `why`, and `learning` and `problems` (of the run's files) as of now."""
        learning, problems = self.learning()
        now = {"state": self.state, "why": self.why or None, "learning": learning, "problems": list(problems)}
        return {**self.content, **now}


def newest_run(runs: Path) -> RunDir:
    """The run directory below `runs` that was updated last.

    Raises:
        ConfigError: there is none.
    """
    written = [run for run in runs_below(runs) if run.status.exists()]
    if not written:
        raise ConfigError(
            f"{runs} holds no run with a status; name a run directory, or start one: grpo-async train CONFIG"
        )
    return written[0]


def read_status(run_dir: RunDir, *, now: float | None = None) -> RunStatus:
    """Raises ConfigError where there is no status.json, RunError where it is something else."""
    if not run_dir.status.exists():
        raise ConfigError(
            f"{run_dir.root} has no status.json: no run was started there, or an older version of grpo-async wrote it"
        )
    problems: list[str] = []
    content = read_object(run_dir.status, problems)
    if content.get("version") != VERSION or content.get("state") not in EXIT_CODES:
        why = f": {problems[0]}" if problems else ""
        raise RunError(f"{run_dir.status} is not a status of this version (layout {VERSION}){why}")
    found = state_of(content, now=now)
    # after a failure it is of an earlier attempt
    summary = read_object(run_dir.summary, []) if found.state in (FINISHED, STOPPED) else {}
    return RunStatus(state=found.state, content=content, why=found.why, summary=summary, run_dir=run_dir)


def print_status(console: Console, status: RunStatus) -> None:
    """For people. Escape sequences in the texts are removed."""
    rows = _rows(status, time.time())
    print_rows(console, [(name, Text(one_line(text), style=style)) for name, text, style in rows if text])


def _rows(status: RunStatus, now: float) -> Iterator[RunRow]:
    """What the dashboard shows, and after the end the summary, between what only status.json has."""
    content, is_running = status.content, status.state == RUNNING
    learning, problems = status.learning()
    progress = Progress.of({**content, "learning": learning})
    color = _COLORS[LEVELS[status.state]]
    updated = float(content.get("updated_at", 0.0))
    took = duration(max(0, round((now if is_running else updated) - float(content.get("started_at", now)))))
    yield "run", f"{content.get('run')}  ({content.get('directory')})", ""
    yield "state", join([status.state, status.why, progress.phase if is_running else None]), color
    yield "error", str(content.get("error") or ""), ""
    yield "precision", str(content.get("precision") or ""), ""
    fraction = f"  {progress.step / progress.max_steps:.0%}" if progress.max_steps else ""
    yield "step", f"{steps_text(progress)}{fraction}", ""
    if is_running:
        yield "elapsed", join([took, left_text(progress), progress.text("step_time", "{:.1f} s/step")]), ""
    else:
        yield "took", f"{took} (this attempt, with its start and end)", ""
    for server in progress.servers if is_running else ():
        yield f"server {server.index}", server_text(server, has_host=True).plain, ""
    if status.summary:
        yield from ((name, text, "") for name, text in summary_rows(status.summary) if name != "run")
    else:
        yield "reward", "" if progress.reward is None else f"{progress.reward:.3f} (all groups of the last step)", ""
        yield from run_rows(progress, now, width=_MAX_EXAMPLE)
    yield "problem", join(problems, "; "), ""
    last = "ended" if status.state in (FINISHED, STOPPED, FAILED) else "last update"
    yield "launcher", f"{_launcher(status)}, {last} {ago(updated, now)}", ""


def _launcher(status: RunStatus) -> str:
    return f"pid {status.content.get('pid')} on {status.content.get('host')}"


def watch(run_dir: RunDir, console: Console) -> RunStatus:
    """Show the run until it has ended (or Ctrl-C); returns its last status. Without a terminal: one line per step.

    Raises:
        ConfigError, RunError: there is no status to be read.
    """
    log, status, pause = MetricsReader(run_dir.metrics), read_status(run_dir), threading.Event()
    phase, shown = "", log.rows()
    shown.pop(max(shown, default=0), None)  # the newest step is news
    with contextlib.ExitStack() as stack:
        live = None
        if console.is_terminal and not console.is_dumb_terminal:
            live = stack.enter_context(Live(console=console, screen=True, auto_refresh=False, transient=True))
        try:
            while True:  # until the run ends, or Ctrl-C
                status = read_status(run_dir)
                if live is not None:
                    live.update(_picture(status, log, console), refresh=True)
                else:
                    rows = log.rows()
                    phase = _print_news(status, rows, shown, phase, console)
                    shown = rows
                if status.state != RUNNING:
                    return status
                pause.wait(WATCH_INTERVAL_S)  # a file of another process: there is no event to wait for
        except KeyboardInterrupt:
            return status


def _picture(status: RunStatus, log: MetricsReader, console: Console) -> RenderableType:
    progress = Progress.of(status.content)
    rows = progress.past(log.rows().values())
    progress.set_past(rows)
    width, height = console.size
    footer = f"{_launcher(status)} · Ctrl-C leaves, the run continues"
    return dashboard(
        progress, rows, run_name=str(status.content.get("run", "")), footer=footer, width=width, height=height
    )


def _print_news(
    status: RunStatus, rows: Mapping[int, MetricRow], shown: Mapping[int, MetricRow], phase: str, console: Console
) -> str:
    """What is new since `shown` and `phase`; returns the phase. A step that runs again has another row; a resume writes those of
    earlier steps into another file, where they are read again."""
    progress = Progress.of(status.content)
    if progress.phase != phase:
        print_line(console, progress.phase)
    news = {step: row for step, row in rows.items() if (known := shown.get(step)) is not row and known != row}
    progress.set_past(row for step, row in rows.items() if step not in news)
    for step, row in news.items():
        progress.add_step(step, progress.max_steps, row)
        print_line(console, step_line(progress))
    return progress.phase
