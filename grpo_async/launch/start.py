"""From a configuration to an exit code: check, plan, prepare the run directory, supervise, report.

config -> checks -> plan -> run directory -> launch.supervise { inference servers, torchrun { trainer ranks } } -> summary, report

User faults are raised (ConfigError) before anything is started. What goes wrong later is printed once the dashboard is closed, and
becomes exit code 1.
"""

from __future__ import annotations

from importlib.util import find_spec

from grpo_async.checks.config_checks import check_inputs
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_config
from grpo_async.display.output import Output
from grpo_async.errors import ConfigError
from grpo_async.launch.gpus import fill_dtypes, gpus_of_lead
from grpo_async.launch.plan import plan_dry
from grpo_async.launch.prepare import check_start
from grpo_async.launch.run import end_with_report, lead_run, prepared
from grpo_async.processes.machine import inspect_machine
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import choose_engine
from grpo_async.utils.extras import needs


def launch(
    config: ExperimentConfig,
    *,
    resume: str | None = None,
    clean: bool = False,
    dry_run: bool = False,
    output: Output | None = None,
) -> int:
    """Run an experiment to its end, with all its processes; call it from the main thread.

    Args:
        resume: None begins a new run; "latest" continues from the newest whole checkpoint, "40" from that of step 40.
        clean: remove an old run of the same name first.
        dry_run: check, print the plan and the resolved configuration, start and write nothing.
        output: where and how much it prints; None: everything, as a dashboard on a terminal and as lines elsewhere.

    Returns:
        The exit code: 0 finished, 1 failed (the cause is on stderr), 130 after SIGINT, 143 after SIGTERM, SIGHUP or SIGQUIT.

    Raises:
        ConfigError: the configuration, or something that it names, is wrong; nothing was started.
        RunError: a child could not be started at all, the machine has no usable temporary folder, or another machine cannot take
            part.
    """
    output = output or Output()
    with output.reporting():
        if dry_run:
            _run_dry(config, output, resume=resume, clean=clean)
            return 0
        if config.launch.ray is None:
            return _run(config, output, resume=resume, clean=clean)
        if find_spec("ray") is None:
            raise ConfigError(f"launch.ray: {needs('ray')}")
        from grpo_async.launch.ray import run_on_ray

        return run_on_ray(config, resume=resume, clean=clean, output=output)


def _run_dry(config: ExperimentConfig, output: Output, *, resume: str | None, clean: bool) -> None:
    start = check_start(config, resume=resume, clean=clean)
    engine = choose_engine(config, is_here=config.launch.ray is None)
    config = fill_dtypes(config, engine, gpus_of_lead(config, inspect_machine().gpus))
    with output.working("checking the configuration, the data and the rewards ..."):
        notes = check_inputs(config, engine=engine, deep=True)
    plan = plan_dry(config, resume_step=start.resume_step, plans_memory=True, notes=[*start.notes, *notes])
    output.answer(f"{plan.describe()}\n{dump_config(config)}dry run: nothing was started or written")


def _run(config: ExperimentConfig, output: Output, *, resume: str | None, clean: bool) -> int:
    """Run on this machine alone until the end, and say how it was; returns the exit code."""
    check_start(config, resume=resume, clean=clean)  # before what takes seconds
    engine = choose_engine(config)
    config = fill_dtypes(config, engine, inspect_machine().gpus)
    with output.working("checking the configuration, the data and the rewards ..."):
        notes = check_inputs(config, engine=engine)
    run_dir = RunDir(config.run_path.absolute())
    with prepared(config, run_dir, resume=resume, clean=clean) as start:  # another launcher may have had it until now
        outcome = lead_run(config, engine, output, start=start, notes=notes)
        end_with_report(outcome, config, run_dir, output)
        return outcome.exit_code
