"""`grpo-async status --watch`: the dashboard of a run that another terminal (or no terminal) started, from its files."""

from __future__ import annotations

import threading
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live

from grpo_async.display.curve import Curve
from grpo_async.display.dashboard import dashboard
from grpo_async.display.display import print_line
from grpo_async.display.progress import Progress, step_line
from grpo_async.display.status import RunStatus, progress_of, read_status
from grpo_async.rundir import RunDir
from grpo_async.tracking.jsonl import read_line
from grpo_async.utils.growing_file import GrowingFile
from grpo_async.utils.run_state import RUNNING

INTERVAL_S = 1.0
_NUM_REWARDS = 6  # for the average and the change


class MetricsTail:
    """What metrics.jsonl says, read on; begins anew when a resume has cut the file."""

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path, self._forget)
        self.progress = Progress(max_steps=0)

    @property
    def curves(self) -> dict[str, Curve]:
        return self.progress.curves

    def read(self) -> None:
        """Take the new lines into the curves; a line that is not whole yet is taken the next time."""
        for _, line in self._file.new_lines():
            if (metrics := read_line(line)) is not None:
                self.progress.add_to_curves(int(metrics["step"]), metrics)

    def _forget(self) -> None:
        self.progress = Progress(max_steps=0)


def watch(run_dir: RunDir, console: Console) -> RunStatus:
    """Show the run until it has ended (or Ctrl-C); returns what was said last. Without a terminal: one line per step.

    Raises:
        ConfigError, RunError: there is no status to be read.
    """
    return (
        _watch_live(run_dir, console)
        if console.is_terminal and not console.is_dumb_terminal
        else _watch_lines(run_dir, console)
    )


def _watch_live(run_dir: RunDir, console: Console) -> RunStatus:
    tail, pause = MetricsTail(run_dir.metrics), threading.Event()
    status = read_status(run_dir)
    with Live(console=console, screen=True, auto_refresh=False, transient=True) as live:
        try:
            while True:  # until the run ends, or Ctrl-C
                status = read_status(run_dir)
                tail.read()
                live.update(_picture(status, tail, console), refresh=True)
                if status.state != RUNNING:
                    return status
                pause.wait(INTERVAL_S)  # a file of another process: there is no event to wait for
        except KeyboardInterrupt:
            return status


def _picture(status: RunStatus, tail: MetricsTail, console: Console) -> Group:
    progress = progress_of(status.content)
    progress.curves = tail.curves
    if reward := tail.progress.curves["reward"].points:
        progress.rewards = [point.value for point in reward[-_NUM_REWARDS:]]
    width, height = console.size
    footer = f"{run_label(status)} · Ctrl-C leaves, the run goes on"
    name = str(status.content.get("run", ""))
    return Group(*dashboard(progress, run_name=name, footer=footer, width=width, height=height))


def run_label(status: RunStatus) -> str:
    """ "pid 17 on HOST"."""
    return f"pid {status.content.get('pid')} on {status.content.get('host')}"


def _watch_lines(run_dir: RunDir, console: Console) -> RunStatus:
    pause, told = threading.Event(), (-1, "")
    status = read_status(run_dir)
    try:
        while True:  # until the run ends, or Ctrl-C
            status = read_status(run_dir)
            progress = progress_of(status.content)
            if (progress.step, progress.phase) != told:
                if progress.phase != told[1]:
                    print_line(console, progress.phase)
                elif progress.step > 0:
                    print_line(console, step_line(progress))
                told = progress.step, progress.phase
            if status.state != RUNNING:
                return status
            pause.wait(INTERVAL_S)  # a file of another process: there is no event to wait for
    except KeyboardInterrupt:
        return status
