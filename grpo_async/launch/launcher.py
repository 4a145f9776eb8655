"""From a configuration to an exit code: check, plan, prepare the run directory, supervise, report.

User faults are raised (ConfigError) before anything is started. What goes wrong later is printed to stderr here,
because only here is it known when the live panel is gone, and becomes exit code 1.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from grpo_async.config import ExperimentConfig
from grpo_async.inference.surface import token_from_environment
from grpo_async.launch import machine as machine_module
from grpo_async.launch.checks import check_inputs
from grpo_async.launch.display import make_display
from grpo_async.launch.engine_choice import EngineChoice, choose_engine
from grpo_async.launch.plan import Places, ProcessPlan, plan_processes
from grpo_async.launch.prepare import Start, check_start, empty, lock
from grpo_async.launch.summary import print_summary
from grpo_async.launch.supervisor import Outcome, Supervisor
from grpo_async.launch.wording import plain
from grpo_async.rundir import RunDir, write_atomically

Amend = Callable[[ProcessPlan], ProcessPlan]


def launch(
    config: ExperimentConfig, *, resume: str | None, clean: bool, dry_run: bool, amend: Amend = lambda plan: plan
) -> int:
    """Run one experiment; returns the exit code. See `grpo_async.launch.run`.

    Args:
        amend: changes the plan before it is carried out (other commands for the same roles).

    Raises:
        ConfigError: the input is wrong; nothing was started.
    """
    from grpo_async.config.loader import dump_config

    notes = check_inputs(config)
    engine = choose_engine(config)
    start = check_start(config, resume=resume, clean=clean)
    run_dir = RunDir(config.run_path.absolute())
    console = Console(highlight=False)
    if dry_run:
        plan = amend(_plan(config, engine, start, _places_of_a_dry_run(run_dir, config), token="", notes=notes))
        _print(console, f"{plan.describe()}\n{dump_config(config)}dry run: nothing was started or written")
        return 0
    with lock(run_dir):
        start = check_start(config, resume=resume, clean=clean)  # again: another launcher may have had it until now
        if clean:
            empty(run_dir)
        run_dir.create()
        attempt = run_dir.new_attempt()
        write_atomically(run_dir.config, dump_config(config))
        with machine_module.private_folder() as private:
            places = Places(
                run_dir=run_dir, attempt=attempt, private=private, port=machine_module.free_port(config.inference.host)
            )
            token = token_from_environment() if engine.engine == "external" else secrets.token_urlsafe(32)
            plan = amend(_plan(config, engine, start, places, token=token, notes=notes))
            write_atomically(run_dir.plan, plan.describe())
            _print(console, plan.describe())
            outcome = _supervise(config, plan, console)
    return _report(outcome, run_dir, console)


def describe_plan(config: ExperimentConfig) -> str:
    """The processes that `config` would start, for humans; looks at the machine, not at the files that `config` names."""
    places = _places_of_a_dry_run(RunDir(config.run_path.absolute()), config)
    plan = plan_processes(
        config, engine=choose_engine(config), places=places, machine=machine_module.look(), token=None
    )
    return plan.describe()


def _plan(
    config: ExperimentConfig,
    engine: EngineChoice,
    start: Start,
    places: Places,
    *,
    token: str | None,
    notes: Sequence[str],
) -> ProcessPlan:
    return plan_processes(
        config,
        engine=engine,
        places=places,
        machine=machine_module.look(),
        token=token,
        resume_step=start.resume_step,
        notes=(*start.notes, *notes),
    )


def _places_of_a_dry_run(run_dir: RunDir, config: ExperimentConfig) -> Places:
    """Names of the right shape; nothing of it is made."""
    port = machine_module.free_port(config.inference.host)
    private = Path(tempfile.gettempdir()) / "grpo-async-RANDOM"
    return Places(run_dir=run_dir, attempt=run_dir.logs / "attempt_N", private=private, port=port)


def _supervise(config: ExperimentConfig, plan: ProcessPlan, console: Console) -> Outcome:
    display = make_display(
        console, run_name=config.run.name, max_steps=config.training.max_steps, logs=plan.places.run_dir.latest_logs
    )
    with display:
        return asyncio.run(Supervisor(plan, display, stop_timeout_s=config.launch.stop_timeout_s).run())


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
