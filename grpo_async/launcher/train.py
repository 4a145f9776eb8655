"""From a configuration to an exit code: check, plan, prepare the run directory, supervise, report.

config -> checks -> plan -> run directory -> supervisor { inference server, torchrun { trainer ranks } } -> summary

User faults are raised (ConfigError) before anything is started. What goes wrong later is printed to stderr here,
because only here is it known when the live panel is gone, and becomes exit code 1.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from grpo_async.checks.config_checks import check_inputs
from grpo_async.checks.report import Check
from grpo_async.cluster.node_hub import HubListener, NodeHub
from grpo_async.cluster.node_link import Offer, leave_mark, own_versions
from grpo_async.cluster.nodes import choose_node_rank, leading_node, shared_token
from grpo_async.cluster.slurm import note_job
from grpo_async.config import ExperimentConfig
from grpo_async.display.output import Output
from grpo_async.inference.surface import token_from_environment
from grpo_async.launcher.conduct import conduct, end_with_report, report_end
from grpo_async.launcher.follower import Follower
from grpo_async.launcher.gpus import split_memory
from grpo_async.launcher.guardian import private_folder
from grpo_async.launcher.plan import SERVERS_ELSEWHERE, ProcessPlan, dry_assignment, free_ports, plan_processes
from grpo_async.launcher.prepare import Start, check_start, empty, lock, set_aside_broken, writing
from grpo_async.launcher.signals import unwinding
from grpo_async.launcher.supervisor import Outcome
from grpo_async.processes import machine as machine_module
from grpo_async.processes.assignment import Assignment, Node
from grpo_async.rundir import RunDir, write_atomically
from grpo_async.servers.engine_choice import EngineChoice, choose_engine

_ALONE = Node()
_FROM_THE_BEGINNING = Start(resume_step=None)
Amend = Callable[[ProcessPlan], ProcessPlan]


def launch(
    config: ExperimentConfig,
    *,
    resume: str | None = None,
    clean: bool = False,
    dry_run: bool = False,
    node_rank: int | None = None,
    preflight_only: bool = False,
    on_checks: Callable[[Sequence[Check]], None] = lambda checks: None,
    amend: Amend = lambda plan: plan,
    output: Output | None = None,
) -> int:
    """Run an experiment to its end, with all its processes; call it from the main thread.

    Args:
        resume: None begins a new run; "auto" goes on from the newest whole checkpoint, "40" from that of step 40.
        clean: remove an old run of the same name first.
        dry_run: check, print the plan and the resolved configuration, start and write nothing.
        node_rank: of this machine; None: see nodes.choose_node_rank. Of several, node 0 decides all that concerns the run
            directory (`resume`, `clean`); the others follow it.
        preflight_only: start the processes, make the checks before the first step, print them and end everything: exit code 0
            when none failed, else 1. Everything is written to a temporary run directory; that of `config` is not touched.
        on_checks: with `preflight_only`, gets the checks at the end, if they were made.
        amend: changes the plan before it is carried out (other commands for the same roles).
        output: how it tells of itself; None: everything, as a dashboard on a terminal and as lines elsewhere.

    Returns:
        The exit code: 0 finished, 1 failed (the cause is on stderr), 130 after SIGINT, 143 after SIGTERM or SIGHUP.

    Raises:
        ConfigError: the configuration, or something that it names, is wrong; nothing was started.
        RunError: a child could not be started at all, or the machine has no usable temporary folder.
    """
    output = output or Output()
    with output.reporting():
        alone: tuple[str, ...] = ()
        rank = 0
        if preflight_only:
            config, alone = _on_one_machine(config)
        elif node_rank is not None or not dry_run:
            rank = choose_node_rank(config, node_rank)
        engine = choose_engine(config)
        notes = (*check_inputs(config, engine=engine, node_rank=rank, deep=dry_run), *alone)
        launcher = _Launcher(config, engine, output, notes, amend)
        if preflight_only:
            return launcher.preflight(on_checks)
        if rank > 0 and not dry_run:
            return launcher.follow(rank)
        start = check_start(config, resume=resume, clean=clean)
        if dry_run:
            return launcher.describe(rank, start)
        node = leading_node(config)
        with lock(launcher.run_dir):
            start = check_start(config, resume=resume, clean=clean)  # again: another launcher may have had it until now
            return launcher.lead(node, start, clean=clean)


def _on_one_machine(config: ExperimentConfig) -> tuple[ExperimentConfig, tuple[str, ...]]:
    """`config` with the trainer ranks of this machine only, and what is to be said of it."""
    nodes = config.launch.nodes
    if nodes == 1:
        return config, ()
    launch_section = config.launch.model_copy(update={"nodes": 1, "rdzv": None, "sharding": "full"})
    note = f"launch.nodes: {nodes}; the checks are made with the trainer ranks of this machine only"
    return config.model_copy(update={"launch": launch_section}), (note,)


@dataclass(frozen=True, slots=True)
class _Launcher:
    """One command, whose configuration has been checked."""

    config: ExperimentConfig
    engine: EngineChoice
    output: Output
    notes: tuple[str, ...]
    amend: Amend

    @property
    def run_dir(self) -> RunDir:
        return RunDir(self.config.run_path.absolute())

    def describe(self, rank: int, start: Start) -> int:
        """Print the plan of machine `rank` and the configuration."""
        from grpo_async.config.loader import dump_config

        assignment = dry_assignment(self.config, node_rank=rank, resume_step=start.resume_step)
        plan = self._plan(assignment, free_ports(self.config) if rank == 0 else (), token=None, start=start)
        self.output.answer(f"{plan.describe()}\n{dump_config(self.config)}dry run: nothing was started or written")
        return 0

    def follow(self, rank: int) -> int:
        """Take part in a run that another machine leads."""
        follower = Follower(self.config, self.run_dir, self.output, rank=rank, amend=self.amend)
        return report_end(asyncio.run(follower.run()), self.run_dir, self.output)

    def lead(self, node: Node, start: Start, *, clean: bool) -> int:
        """Train in the run directory, which is ours."""
        with writing(self.run_dir):
            if clean or start.is_reused:
                empty(self.run_dir, keeps_logs=not clean)
            set_aside_broken(self.run_dir, start)
        return end_with_report(self._run(start, node=node), self.config, self.run_dir, self.output)

    def preflight(self, on_checks: Callable[[Sequence[Check]], None]) -> int:
        """Make the checks in a temporary run directory."""
        folder = Path(tempfile.mkdtemp(prefix="grpo-async-preflight-"))
        run = self.config.run.model_copy(update={"dir": folder})
        elsewhere = _Launcher(
            self.config.model_copy(update={"run": run}), self.engine, self.output, self.notes, self.amend
        )
        keep = False
        try:
            outcome = elsewhere._run(_FROM_THE_BEGINNING, preflight_only=True)
            if outcome.checks is not None:
                on_checks(outcome.checks)
            keep = outcome.exit_code == 1 and outcome.checks is None  # it broke: the logs say more than the error
            if keep:
                logs = elsewhere.run_dir.logs
                outcome = Outcome(exit_code=1, error=f"{outcome.error}\nthe logs are kept: {logs}")
            return report_end(outcome, elsewhere.run_dir, self.output)
        finally:
            if not keep:
                shutil.rmtree(folder, ignore_errors=True)

    def _run(self, start: Start, *, preflight_only: bool = False, node: Node = _ALONE) -> Outcome:
        from grpo_async.config.loader import dump_config

        config, run_dir = self.config, self.run_dir
        with writing(run_dir):
            run_dir.create(dump_config(config))
            attempt = run_dir.new_attempt()
            note_job(attempt)
        with unwinding(), ExitStack() as stack:
            if self.engine.engine == "external" or not node.is_alone:
                token = token_from_environment()  # that of running servers, or of several machines
            else:
                with writing(run_dir):
                    token = stack.enter_context(run_dir.new_token())
            assignment = Assignment(
                run_dir=run_dir,
                attempt_dir=attempt,
                private=stack.enter_context(private_folder()),
                resume_step=start.resume_step,
                preflight_only=preflight_only,
                node=node,
            )
            plan = self._plan(assignment, free_ports(config), token=token, start=start)
            with writing(run_dir):
                write_atomically(run_dir.plan, plan.describe())
            self.output.start(run_name=config.run.name, directory=run_dir.root, pid=os.getpid(), plan=plan.describe())
            return conduct(config, plan, self.output, _hub_maker(config, plan))

    def _plan(self, assignment: Assignment, ports: Sequence[int], *, token: str | None, start: Start) -> ProcessPlan:
        machine = machine_module.inspect()
        leads = assignment.node.rank == 0
        return self.amend(
            plan_processes(
                self.config,
                engine=self.engine if leads else SERVERS_ELSEWHERE,
                assignment=assignment,
                ports=ports,
                machine=machine,
                token=token,
                memory=split_memory(self.config, self.engine, machine.gpus, machine.gpu_bytes) if leads else None,
                notes=(*start.notes, *self.notes) if leads else (),
            )
        )


def _hub_maker(config: ExperimentConfig, plan: ProcessPlan) -> Callable[[HubListener], NodeHub] | None:
    """Builds node 0's channel to the other machines; None where there are none."""
    from grpo_async.config.loader import dump_config

    given, node = plan.assignment, plan.assignment.node
    if node.is_alone:
        return None
    mark = secrets.token_hex(16)
    leave_mark(given.attempt_dir, mark)
    offer = Offer(
        config=dump_config(config),
        versions=own_versions(),
        attempt=given.attempt_dir.name,
        mark=mark,
        store_port=node.store_port,
        server_urls=given.server_urls,
        transport=given.transport,
        resume_step=given.resume_step,
    )
    _, port = config.launch.meeting_point

    def make(listener: HubListener) -> NodeHub:
        return NodeHub(
            node.address, port, count=node.count, token=shared_token(), offer=offer.as_json(), listener=listener
        )

    return make
