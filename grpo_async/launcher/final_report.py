"""Writes report.html when a run has ended and was summed up, however it ended; whatever goes wrong with it, the run keeps its exit
code."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from grpo_async.config import ExperimentConfig
from grpo_async.display.output import Output
from grpo_async.launcher.conduct import report_end
from grpo_async.launcher.supervisor import Outcome
from grpo_async.processes.wording import plain
from grpo_async.rundir import RunDir

_TIMEOUT_S = 120.0
_TIMEOUT_AFTER_STOP_S = 15.0
"""After a signal: a scheduler's SIGKILL follows soon (launch.slurm plans with a minute more than the stop)."""
_KILL_TIMEOUT_S = 10.0
_MOST_WORDS = 400  # characters of what the child said


class EndSignals:
    """SIGTERM, SIGINT and SIGHUP within the `with` block end the report, if it is being written, and nothing else."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        self._child: subprocess.Popen[str] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if number is signal.SIGHUP and signal.getsignal(number) is signal.SIG_IGN:  # nohup means it
                continue
            self._before[number] = signal.signal(number, self._take) or signal.SIG_DFL
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    def ends(self, child: subprocess.Popen[str]) -> None:
        """A signal kills `child`, also one that has come already."""
        self._child = child
        if self.first is not None:
            child.kill()

    def _take(self, number: int, frame: FrameType | None) -> None:
        self.first = self.first or signal.Signals(number)
        if self._child is not None:
            self._child.kill()


def end_with_report(outcome: Outcome, config: ExperimentConfig, run_dir: RunDir, output: Output) -> int:
    """Say how the run ended, then write its report; returns the exit code, which no signal changes from here on."""
    with EndSignals() as signals:
        exit_code = report_end(outcome, run_dir, output, report=run_dir.report if config.record.report else None)
        write_final_report(config, run_dir, output, was_stopped=exit_code not in (0, 1), signals=signals)
    return exit_code


def write_final_report(
    config: ExperimentConfig,
    run_dir: RunDir,
    output: Output,
    *,
    was_stopped: bool = False,
    signals: EndSignals | None = None,
) -> Path | None:
    """The report of the run, written by a child process; None where there is none, and the user was told why.

    A child: reading a large store takes memory and may fail in a library, and neither is to touch the end of the run.

    Args:
        was_stopped: a signal has ended the run: the child has 15 seconds instead of two minutes.
        signals: what ends the child before.
    """
    if not config.record.report:
        return None
    signals = signals or EndSignals()
    timeout_s = _TIMEOUT_AFTER_STOP_S if was_stopped else _TIMEOUT_S
    command = [sys.executable, "-m", "grpo_async", "report", str(run_dir.root)]
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C now is for this process, which then ends the child
        )
    except OSError as error:
        _warn(output, run_dir, str(error))
        return None
    signals.ends(child)
    try:
        _, said = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        _kill(child)
        _warn(output, run_dir, f"it was not done after {timeout_s:g} s")
        return None
    if child.returncode == 0:
        return run_dir.report
    if signals.first is not None:
        _warn(output, run_dir, f"{signals.first.name} ended it")
    else:
        last = (said.strip().splitlines() or [f"exit code {child.returncode}"])[-1]
        _warn(output, run_dir, last[:_MOST_WORDS])
    return None


def _kill(child: subprocess.Popen[str]) -> None:
    child.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel; this process ends without it
        child.communicate(timeout=_KILL_TIMEOUT_S)


def _warn(output: Output, run_dir: RunDir, why: str) -> None:
    output.warn(f"there is no report.html: {plain(why)}; try again: grpo-async report {run_dir.root}")
