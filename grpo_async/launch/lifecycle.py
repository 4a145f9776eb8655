"""One plan from its first process to its last, as the user sees it: displays, status.json, how it ended, the report.

report.html is written when a run was summed up, however it ended; whatever goes wrong with it, the run keeps its exit code.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import TYPE_CHECKING

from rich.console import Console

from grpo_async.config import ExperimentConfig
from grpo_async.display.output import Output
from grpo_async.display.progress import StatusContent
from grpo_async.display.status_file import StatusFile
from grpo_async.display.summary import print_summary
from grpo_async.findings import RunHistory, diagnose
from grpo_async.launch.advisor import Advisor
from grpo_async.launch.plan import ProcessPlan
from grpo_async.launch.signals import exit_on_signals
from grpo_async.launch.supervisor import RunOutcome, supervise
from grpo_async.run_directory import RunDir
from grpo_async.utils.processes import describe_exit
from grpo_async.utils.run_state import FAILED, FINISHED, STOPPED
from grpo_async.utils.safe_text import plain
from grpo_async.utils.text import clipped, last_line

if TYPE_CHECKING:
    from grpo_async.launch.nodes import RayNodes

_REPORT_TIMEOUT_S = 120.0
_REPORT_TIMEOUT_AFTER_STOP_S = 15.0
"""After a signal: a scheduler's SIGKILL follows soon (docs/howto/slurm.md plans with a minute more than the stop)."""
_MAX_PROBLEM = 400  # characters of what the child said


def run_with_display(
    config: ExperimentConfig, plan: ProcessPlan, output: Output, nodes: RayNodes | None = None
) -> RunOutcome:
    """Carry out the plan of a run in front of the user; status.json is kept meanwhile."""
    assignment = plan.assignment
    run_dir = assignment.run_dir
    display = output.display(
        run_name=config.run.name,
        max_steps=config.num_steps,
        run_dir=run_dir,
        resume_step=assignment.resume_step,
        lines_only=assignment.purpose != "train",
    )
    about = {
        "purpose": assignment.purpose,  # train or evaluation
        "attempt": str(assignment.attempt_dir),  # folder of its logs
        "engine": plan.engine.engine,  # embedded, vllm or external: what generates
        "on_gpu": plan.trainer is not None and bool(plan.trainer.gpus),  # the trainer
        "precision": config.precision,  # dtypes of master weights, computation, servers and logits
    }
    status = StatusFile(StatusContent(run_dir, display.progress, run_name=config.run.name, about=about))
    display.views.append(status)
    if assignment.purpose == "train":
        every = config.record.advise_every_steps
        display.views.append(Advisor(display, every_steps=every, run_dir=run_dir))
    outcome = supervise(config, plan, display, nodes)
    states = {0: FINISHED, 1: FAILED}
    status.end(states.get(outcome.exit_code, STOPPED), exit_code=outcome.exit_code, error=outcome.error)
    return outcome


def report_end(outcome: RunOutcome, run_dir: RunDir, output: Output, *, report: Path | None = None) -> int:
    """Say how the run ended; returns the exit code. `report`: the page about the run, where one is written next."""
    summary, stands = outcome.summary, diagnose(RunHistory.read(run_dir))

    def show(console: Console) -> None:
        assert summary is not None
        print_summary(console, {**summary, "learning": stands.as_dict()}, run_dir.root, report=report)

    if summary is None and report is not None:
        output.say("\n".join(stands.lines))
    output.end(
        exit_code=outcome.exit_code,
        error=outcome.error,
        summary=summary,
        show=None if summary is None else show,
    )
    if summary is None and report is not None:
        output.say(f"what the run did before that: {report}")
    output.console.file.flush()  # whatever comes after it
    return outcome.exit_code


def end_with_report(outcome: RunOutcome, config: ExperimentConfig, run_dir: RunDir, output: Output) -> int:
    """Say how the run ended, then write its report; returns the exit code, which no signal changes from here on."""
    if not config.record.report:
        return report_end(outcome, run_dir, output)
    problem: str | None = None
    try:
        with exit_on_signals():
            exit_code = report_end(outcome, run_dir, output, report=run_dir.report)
            problem = write_report(run_dir, exit_code)
    except (KeyboardInterrupt, SystemExit):
        problem = "a signal ended it"
    warn_of_report(problem, run_dir, output)
    return outcome.exit_code


def warn_of_report(problem: str | None, run_dir: RunDir, output: Output) -> None:
    """Say why there is no report, if there is none."""
    if problem is not None:
        again = shlex.join(["grpo-async", "report", str(run_dir.root)])
        output.warn(f"report.html was not written: {plain(problem)}; try again: {again}")


def write_report(run_dir: RunDir, exit_code: int) -> str | None:
    """Write the report of a run that ended with `exit_code`; returns why there is none, or None. A child writes it: reading
    a large store takes memory and may fail in a library, and neither is to touch the end of the run. An exception in this process
    (a signal) ends the child, too."""
    timeout_s = _REPORT_TIMEOUT_S if exit_code in (0, 1) else _REPORT_TIMEOUT_AFTER_STOP_S
    command = (sys.executable, "-m", "grpo_async", "report", str(run_dir.root))
    try:  # in its own session: a Ctrl-C now is for this process, which then ends the child
        done = subprocess.run(
            command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, timeout=timeout_s, start_new_session=True, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it was not finished after {timeout_s:g} s"
    except OSError as error:
        return str(error)
    if done.returncode == 0:
        return None
    said = last_line(done.stderr.decode(errors="replace")) if done.returncode > 0 else ""
    return clipped(said, _MAX_PROBLEM) or f"its process {describe_exit(done.returncode)}"
