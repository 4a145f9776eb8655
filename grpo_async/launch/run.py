"""One run on the machine with rank 0: its run directory, its plan, its processes in front of the user, its report.

report.html is written however the run ended; whatever goes wrong with it, the run keeps its exit code.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import TYPE_CHECKING, Any

from rich.console import Console

from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_config
from grpo_async.display.display import Display, StatusFile, View
from grpo_async.display.output import Output
from grpo_async.display.summary import print_summary
from grpo_async.findings import Diagnosis, RunHistory, diagnose
from grpo_async.findings.history import MetricsReader
from grpo_async.inference.token import token_from_environment
from grpo_async.launch.plan import own_urls, plan_processes
from grpo_async.launch.prepare import Start, check_start, clear_run_dir, lock, writing
from grpo_async.launch.reaper import private_folder
from grpo_async.launch.signals import exit_on_signals
from grpo_async.launch.supervise import RunOutcome, supervise
from grpo_async.processes.assignment import Assignment, Purpose
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.utils.files import write_atomically
from grpo_async.utils.processes import describe_exit
from grpo_async.utils.run_state import FAILED, FINISHED, STOPPED
from grpo_async.utils.safe_text import plain
from grpo_async.utils.text import clipped, last_line

if TYPE_CHECKING:
    from grpo_async.launch.ray import RayNodes

_REPORT_TIMEOUT_S = 120.0
_REPORT_TIMEOUT_AFTER_STOP_S = 15.0
"""After a signal: a scheduler's SIGKILL follows soon (docs/howto/slurm.md plans with a minute more than the stop)."""
_EARLY = ("no-steps", "too-early")
_MAX_PROBLEM = 400  # characters of what the report's process said


@contextmanager
def prepared(config: ExperimentConfig, run_dir: RunDir, *, resume: str | None, clean: bool) -> Iterator[Start]:
    """Hold the run directory, ready for a run to begin where the context says."""
    with lock(run_dir):
        start = check_start(config, resume=resume, clean=clean)
        with writing(run_dir):
            clear_run_dir(run_dir, start)
        yield start


def lead_run(
    config: ExperimentConfig,
    engine: EngineChoice,
    output: Output,
    *,
    start: Start = Start(),  # noqa: B008 - it is frozen
    purpose: Purpose = "train",
    nodes: RayNodes | None = None,
    notes: Sequence[str],
) -> RunOutcome:
    """Carry out a run whose `config` was checked, in its run directory, which this process holds; `notes` are shown with the plan.
    `nodes`: the other nodes of a run on several."""
    run_dir = RunDir(config.run_path.absolute())
    with writing(run_dir):
        run_dir.create(dump_config(config))
        attempt = run_dir.new_attempt()
    with exit_on_signals(), ExitStack() as stack:
        token = token_from_environment()  # that of running servers, which need not ask for one
        if not config.inference.urls:
            with writing(run_dir):
                token = stack.enter_context(run_dir.new_token())
        assignment = Assignment(
            run_dir=run_dir,
            attempt_dir=attempt,
            private_dir=stack.enter_context(private_folder()),
            resume_step=start.resume_step,
            resume_is_named=start.resume_is_named,
            purpose=purpose,
        )
        if nodes is None:
            assignment = assignment.model_copy(update={"server_urls": own_urls(config, config.inference.host)})
        else:
            assignment = nodes.gather(assignment, token)
        plan = plan_processes(
            config,
            engine=engine,
            assignment=assignment,
            token=token,
            servers=None if nodes is None else range(0),
            notes=(*start.notes, *notes),
        )
        with writing(run_dir):
            write_atomically(run_dir.plan, plan.describe())
        output.start(run_name=config.run.name, directory=run_dir.root, pid=os.getpid(), plan=plan.describe())
        about = {
            "purpose": purpose,  # train or evaluation
            "attempt": str(attempt),  # folder of its logs
            "engine": engine.engine,  # embedded, vllm or external: what generates
            "on_gpu": plan.trainer is not None and bool(plan.trainer.gpus),  # the trainer
            "precision": config.precision,  # dtypes of master weights, computation, servers and logits
        }
        display = output.display(
            run_name=config.run.name,
            max_steps=config.num_steps,
            run_dir=run_dir,
            resume_step=start.resume_step,
            lines_only=purpose != "train",
            about=about,
        )
        status = StatusFile(display.progress)
        display.views.append(status)
        if purpose == "train":
            display.views.append(Advisor(display, every_steps=config.record.advise_every_steps, run_dir=run_dir))
        outcome = supervise(config, plan, display, nodes)
        state = {0: FINISHED, 1: FAILED}.get(outcome.exit_code, STOPPED)
        status.end(state, exit_code=outcome.exit_code, error=outcome.error)
        return outcome


class Advisor(View):
    """Tells `display` how the run stands, by its files: after each evaluation, every `every_steps` steps (0: never), and from
    step to step while that is only "too early to say"."""

    def __init__(self, display: Display, *, every_steps: int, run_dir: RunDir) -> None:
        self._display = display
        self._every_steps = every_steps
        self._run_dir = run_dir
        self._last: Diagnosis | None = None
        self._metrics = MetricsReader(run_dir.metrics)

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        if event == "evaluation" or (event == "step" and self._is_due(fields["step"])):
            self._tell()

    def _is_due(self, step: int) -> bool:
        if not self._every_steps:
            return False
        return step % self._every_steps == 0 or self._last is None or self._last.key in _EARLY

    def _tell(self) -> None:
        diagnosis = diagnose(RunHistory.read(self._run_dir, list(self._metrics.rows().values())))
        is_news = self._last is None or diagnosis.key not in _EARLY or diagnosis.key != self._last.key
        if is_news and diagnosis != self._last:
            self._display.show("learning", **diagnosis.as_dict())
        self._last = diagnosis


# ---- the end of a run ----


def end_with_report(outcome: RunOutcome, config: ExperimentConfig, run_dir: RunDir, output: Output) -> None:
    """Say how the run ended, then write its report. A signal ends that, and changes no exit code."""
    if not config.record.report:
        report_end(outcome, run_dir, output)
        return
    problem: str | None = None
    try:
        with exit_on_signals():
            report_end(outcome, run_dir, output, report=run_dir.report)
            problem = write_report(run_dir, outcome.exit_code)
    except (KeyboardInterrupt, SystemExit):
        problem = "a signal ended it"
    warn_of_report(problem, run_dir, output)


def warn_of_report(problem: str | None, run_dir: RunDir, output: Output) -> None:
    """Say why there is no report, if there is none."""
    if problem is not None:
        again = shlex.join(["grpo-async", "report", str(run_dir.root)])
        output.warn(f"report.html was not written: {plain(problem)}; try again: {again}")


def report_end(outcome: RunOutcome, run_dir: RunDir, output: Output, *, report: Path | None = None) -> None:
    """Say how the run ended. `report`: the page about the run, where one is written next."""
    summary, run = outcome.summary, RunHistory.read(run_dir)

    def show(console: Console) -> None:
        print_summary(console, run, run_dir.root, report=report)

    lacks_summary = summary is None and report is not None
    if lacks_summary:
        output.say("\n".join(diagnose(run).lines))
    exit_code, error = outcome.exit_code, outcome.error
    output.end(exit_code=exit_code, error=error, summary=summary, show=None if summary is None else show)
    if lacks_summary:
        output.say(f"what the run did before that: {report}")
    output.console.file.flush()  # whatever comes after it


def write_report(run_dir: RunDir, exit_code: int) -> str | None:
    """Write the report; returns why there is none. A child writes it: reading a large store takes memory and may fail in a library,
    and neither is to touch the end of the run. An exception in this process (a signal) ends the child, too."""
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
