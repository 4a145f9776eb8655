"""From a configuration to an exit code: check, plan, prepare the run directory, supervise, report.

User faults are raised (ConfigError) before anything is started. What goes wrong later is printed to stderr here,
because only here is it known when the live panel is gone, and becomes exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from grpo_async.config import ExperimentConfig
from grpo_async.inference.surface import token_from_environment
from grpo_async.launch import machine as machine_module
from grpo_async.launch.checks import check_inputs
from grpo_async.launch.display import make_display
from grpo_async.launch.engine_choice import EngineChoice, choose_engine
from grpo_async.launch.layout import split_memory
from grpo_async.launch.plan import Machine, Places, ProcessPlan, plan_processes
from grpo_async.launch.preflight_report import Check
from grpo_async.launch.prepare import Start, check_start, empty, lock
from grpo_async.launch.server_keeper import RestartRules
from grpo_async.launch.summary import print_summary
from grpo_async.launch.supervisor import Outcome, Supervisor
from grpo_async.launch.wording import plain
from grpo_async.rundir import RunDir, write_atomically

Amend = Callable[[ProcessPlan], ProcessPlan]


def launch(
    config: ExperimentConfig,
    *,
    resume: str | None,
    clean: bool,
    dry_run: bool,
    preflight_only: bool = False,
    on_checks: Callable[[Sequence[Check]], None] = lambda checks: None,
    amend: Amend = lambda plan: plan,
) -> int:
    """Run one experiment; returns the exit code. See `grpo_async.launch.run`.

    Args:
        preflight_only: start the processes, make the checks before the first step, print them and end everything: exit code 0
            when none failed, else 1. Everything is written to a temporary run directory; that of `config` is not touched.
        on_checks: with `preflight_only`, gets the checks at the end, if they were made.
        amend: changes the plan before it is carried out (other commands for the same roles).

    Raises:
        ConfigError: the input is wrong; nothing was started.
    """
    from grpo_async.config.loader import dump_config

    notes = check_inputs(config)
    engine = choose_engine(config)
    console = Console(highlight=False)
    if preflight_only:
        return _preflight(config, engine, console, notes=notes, on_checks=on_checks, amend=amend)
    start = check_start(config, resume=resume, clean=clean)
    run_dir = RunDir(config.run_path.absolute())
    if dry_run:
        machine = machine_module.look()
        places = _places_of_a_dry_run(run_dir, config)
        plan = amend(_plan(config, engine, machine, places, token=None, start=start, notes=notes))
        _print(console, f"{plan.describe()}\n{dump_config(config)}dry run: nothing was started or written")
        return 0
    with lock(run_dir):
        start = check_start(config, resume=resume, clean=clean)  # again: another launcher may have had it until now
        if clean:
            empty(run_dir)
        outcome = _run(config, engine, run_dir, console, start=start, notes=notes, amend=amend)
    return _report(outcome, run_dir, console)


def describe_plan(config: ExperimentConfig) -> str:
    """The processes that `config` would start, for humans; looks at the machine, not at the files that `config` names."""
    places = _places_of_a_dry_run(RunDir(config.run_path.absolute()), config)
    plan = plan_processes(
        config, engine=choose_engine(config), places=places, machine=machine_module.look(), token=None
    )
    return plan.describe()


def _preflight(
    config: ExperimentConfig,
    engine: EngineChoice,
    console: Console,
    *,
    notes: Sequence[str],
    on_checks: Callable[[Sequence[Check]], None],
    amend: Amend,
) -> int:
    folder = Path(tempfile.mkdtemp(prefix="grpo-async-preflight-"))
    config = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})
    run_dir = RunDir(config.run_path)
    keep = False
    try:
        start = Start(resume_step=None)
        outcome = _run(config, engine, run_dir, console, start=start, notes=notes, amend=amend, preflight_only=True)
        if outcome.checks is not None:
            on_checks(outcome.checks)
        keep = outcome.exit_code == 1 and outcome.checks is None  # it broke: the logs say more than the error
        if keep:
            outcome = Outcome(exit_code=1, error=f"{outcome.error}\nthe logs are kept: {run_dir.logs}")
        return _report(outcome, run_dir, console)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _run(
    config: ExperimentConfig,
    engine: EngineChoice,
    run_dir: RunDir,
    console: Console,
    *,
    start: Start,
    notes: Sequence[str],
    amend: Amend,
    preflight_only: bool = False,
) -> Outcome:
    from grpo_async.config.loader import dump_config

    machine = machine_module.look()
    run_dir.create()
    attempt = run_dir.new_attempt()
    write_atomically(run_dir.config, dump_config(config))
    with _token(engine, run_dir) as token, machine_module.private_folder() as private:
        places = Places(run_dir=run_dir, attempt=attempt, private=private, ports=_free_ports(config))
        plan = amend(
            _plan(config, engine, machine, places, token=token, start=start, notes=notes, preflight_only=preflight_only)
        )
        write_atomically(run_dir.plan, plan.describe())
        _print(console, plan.describe())
        return _supervise(config, plan, console)


@contextlib.contextmanager
def _token(engine: EngineChoice, run_dir: RunDir) -> Iterator[str | None]:
    """The token of the servers: that of running ones from the environment, of our own ones a new one."""
    if engine.engine == "external":
        yield token_from_environment()
        return
    with run_dir.new_token() as token:
        yield token


def _plan(
    config: ExperimentConfig,
    engine: EngineChoice,
    machine: Machine,
    places: Places,
    *,
    token: str | None,
    start: Start,
    notes: Sequence[str],
    preflight_only: bool = False,
) -> ProcessPlan:
    return plan_processes(
        config,
        engine=engine,
        places=places,
        machine=machine,
        token=token,
        memory=split_memory(config, engine, machine.gpus, machine.gpu_bytes),
        resume_step=start.resume_step,
        preflight_only=preflight_only,
        notes=(*start.notes, *notes),
    )


def _places_of_a_dry_run(run_dir: RunDir, config: ExperimentConfig) -> Places:
    """Names of the right shape; nothing of it is made."""
    private = Path(tempfile.gettempdir()) / "grpo-async-RANDOM"
    return Places(run_dir=run_dir, attempt=run_dir.logs / "attempt_N", private=private, ports=_free_ports(config))


def _free_ports(config: ExperimentConfig) -> tuple[int, ...]:
    if config.inference.urls:
        return ()
    return machine_module.free_ports(config.inference.host, config.inference.replicas)


def _supervise(config: ExperimentConfig, plan: ProcessPlan, console: Console) -> Outcome:
    display = make_display(
        console, run_name=config.run.name, max_steps=config.training.max_steps, logs=plan.places.run_dir.latest_logs
    )
    restarts = RestartRules(max_restarts=config.inference.max_restarts, delay_s=config.inference.restart_delay_s)
    supervisor = Supervisor(plan, display, stop_timeout_s=config.launch.stop_timeout_s, restarts=restarts)
    with display:
        return asyncio.run(supervisor.run())


def _report(outcome: Outcome, run_dir: RunDir, console: Console) -> int:
    if outcome.summary is not None:
        print_summary(console, outcome.summary, run_dir.root)
    if outcome.error is not None:
        console.file.flush()  # before stderr, where both are the same file
        _print(
            Console(stderr=True, highlight=False), f"error: {plain(outcome.error)}"
        )  # it may quote a model or a tool
    return outcome.exit_code


def _print(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)
