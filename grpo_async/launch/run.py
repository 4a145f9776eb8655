"""One run on the machine with rank 0: its run directory, its plan, its processes, from start to end."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_config
from grpo_async.display.output import Output
from grpo_async.inference.token import token_from_environment
from grpo_async.launch.lifecycle import run_with_display
from grpo_async.launch.plan import own_urls, plan_processes
from grpo_async.launch.prepare import Start, check_start, clear_run_dir, lock, writing
from grpo_async.launch.reaper import private_folder
from grpo_async.launch.signals import exit_on_signals
from grpo_async.launch.supervisor import RunOutcome
from grpo_async.processes.assignment import Assignment, Purpose
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.utils.files import write_atomically

if TYPE_CHECKING:
    from grpo_async.launch.nodes import RayNodes


@contextmanager
def prepared(config: ExperimentConfig, run_dir: RunDir, *, resume: str | None, clean: bool) -> Iterator[Start]:
    """Hold the run directory, ready for a run to begin where the context says.

    Raises:
        ConfigError: see `check_start`; or another launcher holds the directory, or it cannot be written.
    """
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
    """Carry out a run on the machine with rank 0, in its run directory, which this process holds.

    Args:
        config: it has been checked.
        nodes: the other nodes of a run on several; None: this is the only machine.
        notes: shown with the plan.
    """
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
        servers = None
        if nodes is None:
            assignment = assignment.model_copy(update={"server_urls": own_urls(config, config.inference.host)})
        else:
            assignment, servers = nodes.gather(config, engine, assignment, token), range(0)
        plan = plan_processes(
            config,
            engine=engine,
            assignment=assignment,
            token=token,
            servers=servers,
            notes=(*start.notes, *notes),
        )
        with writing(run_dir):
            write_atomically(run_dir.plan, plan.describe())
        output.start(run_name=config.run.name, directory=run_dir.root, pid=os.getpid(), plan=plan.describe())
        return run_with_display(config, plan, output, nodes)
