"""From a configuration to an exit code: check, plan, prepare the run directory, supervise, report.

User faults are raised (ConfigError) before anything is started. What goes wrong later is printed to stderr here,
because only here is it known when the live panel is gone, and becomes exit code 1.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from grpo_async.checks.config_checks import check_inputs
from grpo_async.checks.report import Check
from grpo_async.cluster.node_hub import HubListener, NodeHub
from grpo_async.cluster.node_link import Offer, leave_mark, own_versions
from grpo_async.cluster.slurm import note_job
from grpo_async.config import ExperimentConfig
from grpo_async.display.output import Output
from grpo_async.inference.surface import token_from_environment
from grpo_async.launcher.conduct import conduct, report_end
from grpo_async.launcher.dry_run import dry_run_node, dry_run_places, free_ports
from grpo_async.launcher.final_report import end_with_report
from grpo_async.launcher.follower import Follower
from grpo_async.launcher.guardian import private_folder
from grpo_async.launcher.layout import split_memory
from grpo_async.launcher.plan import ProcessPlan, plan_follower, plan_processes
from grpo_async.launcher.prepare import Start, check_start, empty, lock, set_aside_broken, writing
from grpo_async.launcher.signals import unwinding
from grpo_async.launcher.supervisor import Outcome
from grpo_async.launcher.trainer_plan import Places
from grpo_async.processes import machine as machine_module
from grpo_async.processes.machine import Machine
from grpo_async.processes.node_place import NodePlace, choose_node_rank, leading_address, shared_token, socket_names
from grpo_async.rundir import RunDir, write_atomically
from grpo_async.servers.engine_choice import EngineChoice, choose_engine

_ALONE = NodePlace()
Amend = Callable[[ProcessPlan], ProcessPlan]


def launch(
    config: ExperimentConfig,
    *,
    resume: str | None,
    clean: bool,
    dry_run: bool,
    node_rank: int | None = None,
    preflight_only: bool = False,
    on_checks: Callable[[Sequence[Check]], None] = lambda checks: None,
    amend: Amend = lambda plan: plan,
    output: Output | None = None,
) -> int:
    """Run one experiment; returns the exit code. See `grpo_async.launcher.run`.

    Args:
        node_rank: of this machine; None: see node_place.choose_node_rank. Of several, node 0 decides all that concerns the run
            directory (`resume`, `clean`); the others follow it.
        preflight_only: start the processes, make the checks before the first step, print them and end everything: exit code 0
            when none failed, else 1. Everything is written to a temporary run directory; that of `config` is not touched.
        on_checks: with `preflight_only`, gets the checks at the end, if they were made.
        amend: changes the plan before it is carried out (other commands for the same roles).
        output: how it tells of itself; None: everything on stdout.

    Raises:
        ConfigError: the input is wrong; nothing was started.
    """
    output = output or Output()
    with output.reporting():
        return _launch(
            config,
            resume=resume,
            clean=clean,
            dry_run=dry_run,
            node_rank=node_rank,
            preflight_only=preflight_only,
            on_checks=on_checks,
            amend=amend,
            output=output,
        )


def _launch(
    config: ExperimentConfig,
    *,
    resume: str | None,
    clean: bool,
    dry_run: bool,
    node_rank: int | None,
    preflight_only: bool,
    on_checks: Callable[[Sequence[Check]], None],
    amend: Amend,
    output: Output,
) -> int:
    from grpo_async.config.loader import dump_config

    if preflight_only:
        config, alone = _on_one_machine(config)
        rank = 0
    else:
        alone = ()
        rank = 0 if dry_run and node_rank is None else choose_node_rank(config, node_rank)
    engine = choose_engine(config)
    notes = [*check_inputs(config, engine=engine, node_rank=rank, deep=dry_run), *alone]
    if rank > 0 and not dry_run:
        return _follow(config, output, rank=rank, amend=amend)
    if preflight_only:
        return _preflight(config, engine, output, notes=notes, on_checks=on_checks, amend=amend)
    start = check_start(config, resume=resume, clean=clean)
    run_dir = RunDir(config.run_path.absolute())
    if dry_run:
        machine = machine_module.look()
        places = dry_run_places(run_dir, config)
        node = dry_run_node(config, rank)
        if rank == 0:
            plan = _plan(config, engine, machine, places, token=None, start=start, notes=notes, node=node)
        else:
            plan = plan_follower(config, node=node, places=places, machine=machine)
        plan = amend(plan)
        output.answer(f"{plan.describe()}\n{dump_config(config)}dry run: nothing was started or written")
        return 0
    node = _lead_nodes(config)
    with lock(run_dir):
        start = check_start(config, resume=resume, clean=clean)  # again: another launcher may have had it until now
        with writing(run_dir):
            if clean or start.is_reused:
                empty(run_dir, keeps_logs=not clean)
            set_aside_broken(run_dir, start)
        outcome = _run(config, engine, run_dir, output, start=start, notes=notes, amend=amend, node=node)
        return end_with_report(outcome, config, run_dir, output)


def _follow(config: ExperimentConfig, output: Output, *, rank: int, amend: Amend) -> int:
    run_dir = RunDir(config.run_path.absolute())
    outcome = asyncio.run(Follower(config, run_dir, output, rank=rank, amend=amend).run())
    return report_end(outcome, run_dir, output)


def _on_one_machine(config: ExperimentConfig) -> tuple[ExperimentConfig, tuple[str, ...]]:
    """`config` with the trainer ranks of this machine only, and what is to be said of it."""
    nodes = config.launch.nodes
    if nodes == 1:
        return config, ()
    launch_section = config.launch.model_copy(update={"nodes": 1, "rdzv": None, "sharding": "full"})
    note = f"launch.nodes: {nodes}; the checks are made with the trainer ranks of this machine only"
    return config.model_copy(update={"launch": launch_section}), (note,)


def _lead_nodes(config: ExperimentConfig) -> NodePlace:
    """This machine's place as node 0, before anything is written.

    Raises:
        ConfigError: the machines could not meet here.
    """
    if config.launch.nodes == 1:
        return NodePlace()
    shared_token()
    address = leading_address(config)
    _, port = config.launch.meeting_point
    machine_module.check_can_listen(address, port, "launch.rdzv")
    return NodePlace(
        count=config.launch.nodes,
        address=address,
        store_port=machine_module.free_ports(address, 1)[0],
        own_address=address,
        socket_names=socket_names(address),
    )


def _preflight(
    config: ExperimentConfig,
    engine: EngineChoice,
    output: Output,
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
        outcome = _run(config, engine, run_dir, output, start=start, notes=notes, amend=amend, preflight_only=True)
        if outcome.checks is not None:
            on_checks(outcome.checks)
        keep = outcome.exit_code == 1 and outcome.checks is None  # it broke: the logs say more than the error
        if keep:
            outcome = Outcome(exit_code=1, error=f"{outcome.error}\nthe logs are kept: {run_dir.logs}")
        return report_end(outcome, run_dir, output)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _run(
    config: ExperimentConfig,
    engine: EngineChoice,
    run_dir: RunDir,
    output: Output,
    *,
    start: Start,
    notes: Sequence[str],
    amend: Amend,
    preflight_only: bool = False,
    node: NodePlace = _ALONE,
) -> Outcome:
    from grpo_async.config.loader import dump_config

    machine = machine_module.look()
    with writing(run_dir):
        run_dir.create(dump_config(config))
        attempt = run_dir.new_attempt()
        note_job(attempt)
    with unwinding(), _token(engine, run_dir, node) as token, private_folder() as private:
        places = Places(run_dir=run_dir, attempt=attempt, private=private, ports=free_ports(config))
        plan = amend(
            _plan(
                config,
                engine,
                machine,
                places,
                token=token,
                start=start,
                notes=notes,
                preflight_only=preflight_only,
                node=node,
            )
        )
        with writing(run_dir):
            write_atomically(run_dir.plan, plan.describe())
        output.start(run_name=config.run.name, directory=run_dir.root, pid=os.getpid(), plan=plan.describe())
        return conduct(config, plan, output, _hub_maker(config, plan, node))


@contextlib.contextmanager
def _token(engine: EngineChoice, run_dir: RunDir, node: NodePlace) -> Iterator[str | None]:
    """The token of the servers: that of running ones, and that of several machines, from the environment; else a new one."""
    if engine.engine == "external" or not node.is_alone:
        yield token_from_environment()
        return
    with contextlib.ExitStack() as stack:
        with writing(run_dir):
            token = stack.enter_context(run_dir.new_token())
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
    node: NodePlace = _ALONE,
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
        node=node,
    )


def _hub_maker(config: ExperimentConfig, plan: ProcessPlan, node: NodePlace) -> Callable[[HubListener], NodeHub] | None:
    """Builds node 0's channel to the other machines; None where there are none."""
    from grpo_async.config.loader import dump_config

    if node.is_alone:
        return None
    mark = secrets.token_hex(16)
    leave_mark(plan.places.attempt, mark)
    offer = Offer(
        config=dump_config(config),
        versions=own_versions(),
        attempt=plan.places.attempt.name,
        mark=mark,
        store_port=node.store_port,
        server_urls=plan.server_urls,
        transport=plan.transport,
        resume_step=plan.resume_step,
    )
    _, port = config.launch.meeting_point

    def make(listener: HubListener) -> NodeHub:
        return NodeHub(
            node.address, port, count=node.count, token=shared_token(), offer=offer.as_json(), listener=listener
        )

    return make
