"""One plan from its first process to its last, as the user sees it: displays, status.json, how it ended, the report.

report.html is written when a run was summed up, however it ended; whatever goes wrong with it, the run keeps its exit code.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from rich.console import Console

from grpo_async.cluster.node_hub import HubListener, NodeHub
from grpo_async.config import ExperimentConfig
from grpo_async.display.display import Display
from grpo_async.display.output import Output
from grpo_async.display.status_file import StatusFile
from grpo_async.display.summary import print_summary
from grpo_async.findings.pipeline_figures import setup_of
from grpo_async.launcher.advising import Advisor
from grpo_async.launcher.plan import ProcessPlan
from grpo_async.launcher.server_keeper import RestartRules
from grpo_async.launcher.supervisor import Outcome, Supervisor
from grpo_async.processes.wording import plain
from grpo_async.rundir import RunDir

_REPORT_TIMEOUT_S = 120.0
_REPORT_TIMEOUT_AFTER_STOP_S = 15.0
"""After a signal: a scheduler's SIGKILL follows soon (launch.slurm plans with a minute more than the stop)."""
_KILL_TIMEOUT_S = 10.0
_MOST_WORDS = 400  # characters of what the child said


def conduct(
    config: ExperimentConfig,
    plan: ProcessPlan,
    output: Output,
    make_hub: Callable[[HubListener], NodeHub] | None,
) -> Outcome:
    """Carry out the plan of a run in front of the user; status.json and advice.jsonl are kept meanwhile.

    Args:
        make_hub: of several machines, this is node 0: makes the channel to the others.
    """
    given = plan.assignment
    run_dir = given.run_dir
    display = output.display(
        run_name=config.run.name,
        max_steps=config.training.max_steps,
        run_dir=run_dir,
        resume_step=given.resume_step,
        lines_only=given.preflight_only,
    )
    if given.preflight_only:  # nothing of it is kept
        return carry_out(config, plan, display, make_hub)
    on_gpu = bool(plan.trainer.gpus)
    status = StatusFile(
        run_dir,
        display.progress,
        run_name=config.run.name,
        attempt=str(given.attempt_dir),
        engine=plan.engine.engine,
        on_gpu=on_gpu,
        num_gpus=plan.num_gpus,
    )

    def on_lost(text: str) -> None:  # prints nothing
        with display.progress.lock:
            display.progress.add_message(text, is_warning=True)

    output.on_lost = on_lost
    advisor = Advisor(
        display,
        setup=setup_of(config, engine=plan.engine.engine, on_gpu=on_gpu, num_gpus=plan.num_gpus),
        every_steps=config.record.advise_every_steps,
        run_dir=run_dir,
        resume_step=given.resume_step,
    )
    display.views += [status, advisor]
    outcome = carry_out(config, plan, display, make_hub)
    states = {0: "finished", 1: "failed"}
    status.end(states.get(outcome.exit_code, "stopped"), exit_code=outcome.exit_code, error=outcome.error)
    return outcome


def carry_out(
    config: ExperimentConfig,
    plan: ProcessPlan,
    display: Display,
    make_hub: Callable[[HubListener], NodeHub] | None = None,
) -> Outcome:
    """Start the processes of `plan`, and end them; `display` shows what they report."""
    supervisor = Supervisor(
        plan,
        display,
        stop_timeout_s=config.launch.stop_timeout_s,
        heartbeat_timeout_s=config.launch.heartbeat_timeout_s,
        restarts=RestartRules(max_restarts=config.inference.max_restarts, delay_s=config.inference.restart_delay_s),
        make_hub=make_hub,
        rdzv_timeout_s=config.launch.rdzv_timeout_s,
    )
    with display:
        return asyncio.run(supervisor.run())


def report_end(outcome: Outcome, run_dir: RunDir, output: Output, *, report: Path | None = None) -> int:
    """Say how it ended; returns the exit code. `report`: the page about the run, where one is written next."""
    summary = outcome.summary

    def show(console: Console) -> None:
        assert summary is not None
        print_summary(console, summary, run_dir.root, report=report)

    output.end(
        exit_code=outcome.exit_code,
        error=outcome.error,
        summary=summary,
        show=None if summary is None else show,
    )
    if summary is None and report is not None:
        output.say(f"what the run did until then: {report}")
    output.console.file.flush()  # whatever comes after it
    return outcome.exit_code


def end_with_report(outcome: Outcome, config: ExperimentConfig, run_dir: RunDir, output: Output) -> int:
    """Say how the run ended, then write its report; returns the exit code, which no signal changes from here on."""
    if not config.record.report:
        return report_end(outcome, run_dir, output)
    with _EndSignals() as signals:
        exit_code = report_end(outcome, run_dir, output, report=run_dir.report)
        problem = _write_report(run_dir, signals, was_stopped=exit_code not in (0, 1))
        if problem is not None:
            output.warn(f"there is no report.html: {plain(problem)}; try again: grpo-async report {run_dir.root}")
    return exit_code


class _EndSignals:
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


def _write_report(run_dir: RunDir, signals: _EndSignals, *, was_stopped: bool) -> str | None:
    """Why there is no report, or None. A child writes it: reading a large store takes memory and may fail in a library, and neither
    is to touch the end of the run. After a stop it has 15 seconds instead of two minutes."""
    timeout_s = _REPORT_TIMEOUT_AFTER_STOP_S if was_stopped else _REPORT_TIMEOUT_S
    try:
        child = subprocess.Popen(
            [sys.executable, "-m", "grpo_async", "report", str(run_dir.root)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # a Ctrl-C now is for this process, which then ends the child
        )
    except OSError as error:
        return str(error)
    signals.ends(child)
    try:
        _, said = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel; this process ends without it
            child.communicate(timeout=_KILL_TIMEOUT_S)
        return f"it was not done after {timeout_s:g} s"
    if child.returncode == 0:
        return None
    if signals.first is not None:
        return f"{signals.first.name} ended it"
    return (said.strip().splitlines() or [f"exit code {child.returncode}"])[-1][:_MOST_WORDS]
