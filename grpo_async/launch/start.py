"""From a configuration to an exit code: check, plan, prepare the run directory, supervise, report.

config -> checks -> plan -> run directory -> launch.supervise { inference servers, torchrun { trainer ranks } } -> summary, report

User faults are raised (ConfigError) before anything is started. What goes wrong later is printed once the dashboard is closed, and
becomes exit code 1. report.html is written however the run ended; whatever goes wrong with it, the run keeps its exit code.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

from rich.console import Console

from grpo_async.checks.config_checks import check_inputs
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_config
from grpo_async.display.display import Display, StatusFile, View
from grpo_async.display.output import Output
from grpo_async.display.summary import print_summary
from grpo_async.errors import ConfigError, message_of
from grpo_async.findings import Diagnosis, RunHistory, diagnose
from grpo_async.inference.token import token_from_environment
from grpo_async.launch.children import private_folder
from grpo_async.launch.gpus import fill_in_for_devices, gpus_of_lead
from grpo_async.launch.plan import plan_dry
from grpo_async.launch.prepare import Start, check_start, clear_run_dir, lock, writing
from grpo_async.launch.signals import exit_on_signals
from grpo_async.launch.site import LocalSite
from grpo_async.launch.supervise import RunOutcome, Site, supervise
from grpo_async.processes.assignment import Assignment, Purpose
from grpo_async.processes.machine import Machine, inspect_machine
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import EngineChoice, choose_engine
from grpo_async.utils.extras import needs
from grpo_async.utils.files import write_atomically
from grpo_async.utils.processes import describe_exit
from grpo_async.utils.run_state import FAILED, FINISHED, STOPPED
from grpo_async.utils.safe_text import plain
from grpo_async.utils.text import clipped, last_line

_CPUS_OF_A_GPU, _GPU_BYTES = 12, 80 << 30  # of a machine that a dry run imagines
_REPORT_TIMEOUT_S = 120.0
_REPORT_TIMEOUT_AFTER_STOP_S = 15.0  # a scheduler's SIGKILL follows soon (docs/howto/slurm.md)
_EARLY = ("no-steps", "too-early")
_MAX_PROBLEM = 400  # characters of what the report's process said


def launch(
    config: ExperimentConfig,
    *,
    resume: str | None = None,
    clean: bool = False,
    dry_run: bool = False,
    gpus: int | None = None,
    output: Output | None = None,
) -> int:
    """Run an experiment to its end, with all its processes; call it from the main thread.

    Args:
        resume: None begins a new run; "latest" continues from the newest whole checkpoint, "40" from that of step 40.
        clean: remove an old run of the same name first.
        dry_run: check, print the plan, start and write nothing.
        gpus: plan the dry run for a machine with so many of 80 GB; None: for this one.

    Returns:
        The exit code: 0 finished, 1 failed (the cause is on stderr), 130 after SIGINT, 143 after SIGTERM, SIGHUP or SIGQUIT.

    Raises:
        ConfigError: the configuration, or something that it names, is wrong; nothing was started.
        RunError: a child could not be started, or a cluster has no room.
    """
    output = output or Output()
    with output.reporting():
        if dry_run:
            _run_dry(config, output, resume=resume, clean=clean, gpus=gpus)
            return 0
        if config.launch.ray is None:
            return _run(config, output, resume=resume, clean=clean)
        if find_spec("ray") is None:
            raise ConfigError(f"launch.ray: {needs('ray')}")
        from grpo_async.launch.ray import run_on_ray

        return run_on_ray(config, resume=resume, clean=clean, output=output)


def _run_dry(config: ExperimentConfig, output: Output, *, resume: str | None, clean: bool, gpus: int | None) -> None:
    start = check_start(config, resume=resume, clean=clean)
    other = (
        None
        if gpus is None
        else Machine(num_cpus=_CPUS_OF_A_GPU * gpus, gpus=tuple(map(str, range(gpus))), gpu_bytes=_GPU_BYTES)
    )
    is_here = config.launch.ray is None and other is None
    engine = choose_engine(config, is_here=is_here)
    config = fill_in_for_devices(config, engine, gpus_of_lead(config, (other or inspect_machine()).gpus))
    with output.working("checking the configuration, the data and the rewards ..."):
        notes = check_inputs(config, engine=engine, deep=True, is_here=is_here)
    plan = plan_dry(
        config, machine=other, resume_step=start.resume_step, plans_memory=True, notes=[*start.notes, *notes]
    )
    output.answer(
        f"{plan.describe()}\ndry run: no errors found; nothing was started or written. "
        "`grpo-async validate` prints every setting."
    )


def _run(config: ExperimentConfig, output: Output, *, resume: str | None, clean: bool) -> int:
    check_start(config, resume=resume, clean=clean)  # before what takes seconds
    engine = choose_engine(config)
    config = fill_in_for_devices(config, engine, inspect_machine().gpus)
    with output.working("checking the configuration, the data and the rewards ..."):
        notes = check_inputs(config, engine=engine)
    run_dir = RunDir(config.run_path.absolute())
    with prepared(config, run_dir, resume=resume, clean=clean) as start:  # another launcher may have had it until now
        outcome = lead_run(config, engine, output, start=start, notes=notes)
        end_with_report(outcome, config, run_dir, output)
        return outcome.exit_code


# ---- one run on the machine with rank 0 ----


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
    notes: Sequence[str],
    site: Site | None = None,
) -> RunOutcome:
    """Carry out a run whose `config` was checked, in its run directory, which this process holds. `site`: None is this machine."""
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
        site = site or LocalSite(config)
        plan = site.lay_out(engine, assignment, token, (*start.notes, *notes))
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
        outcome = supervise(config, plan.assignment, display, site)
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

    def show(self, event: str, fields: Mapping[str, Any]) -> None:
        is_early = self._last is None or self._last.key in _EARLY
        is_due = event == "step" and self._every_steps and (fields["step"] % self._every_steps == 0 or is_early)
        if event != "evaluation" and not is_due:
            return
        diagnosis = diagnose(RunHistory.read(self._run_dir))
        is_news = self._last is None or diagnosis.key not in _EARLY or diagnosis.key != self._last.key
        if is_news and diagnosis != self._last:
            self._display.show("learning", **diagnosis.as_dict())
        self._last = diagnosis


# ---- the end of a run ----


def end_with_report(outcome: RunOutcome, config: ExperimentConfig, run_dir: RunDir, output: Output) -> None:
    """Say how the run ended, then write its report. A signal ends that, and changes no exit code."""
    report = run_dir.report if config.record.report else None
    problem: str | None = None
    try:
        with exit_on_signals():
            report_end(outcome, run_dir, output, report=report)
            if report is not None:
                problem = _write_report(run_dir, outcome.exit_code)
    except (KeyboardInterrupt, SystemExit):
        problem = "a signal ended it"
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


def _write_report(run_dir: RunDir, exit_code: int) -> str | None:
    """Write the report in a child, whose memory and failures do not touch the end of the run; returns why there is none."""
    timeout_s = _REPORT_TIMEOUT_S if exit_code in (0, 1) else _REPORT_TIMEOUT_AFTER_STOP_S
    command = (sys.executable, "-m", "grpo_async", "report", str(run_dir.root))
    try:  # in its own session: a Ctrl-C now is for this process, which then ends the child
        done = subprocess.run(
            command, stdin=DEVNULL, stdout=DEVNULL, stderr=PIPE, timeout=timeout_s, start_new_session=True, check=False
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        return message_of(error)
    if done.returncode == 0:
        return None
    said = last_line(done.stderr.decode(errors="replace")) if done.returncode > 0 else ""
    return clipped(said, _MAX_PROBLEM) or f"its process {describe_exit(done.returncode)}"
