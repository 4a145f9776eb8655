"""From a configuration to an exit code: check, plan, prepare the run directory, supervise, report.

config -> checks -> plan -> run directory -> supervisor { inference server, torchrun { trainer ranks } } -> summary

User faults are raised (ConfigError) before anything is started. What goes wrong later is printed to stderr here,
because only here is it known when the live panel is gone, and becomes exit code 1.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_async.checks.config_checks import check_inputs
from grpo_async.cluster.nodes import choose_node_rank, leading_node
from grpo_async.cluster.slurm import note_job, restart_of_job
from grpo_async.config import ExperimentConfig
from grpo_async.display.output import Output
from grpo_async.inference.api import token_from_environment
from grpo_async.launcher.conduct import end_with_report, report_end, run_with_display
from grpo_async.launcher.follower import Follower
from grpo_async.launcher.gpus import share_gpus, with_dtypes
from grpo_async.launcher.memory import plan_memory
from grpo_async.launcher.plan import SERVERS_ELSEWHERE, ProcessPlan, dry_assignment, free_ports, plan_processes
from grpo_async.launcher.prepare import Start, check_start, empty, lock, set_aside_broken, writing
from grpo_async.launcher.reaper import private_folder
from grpo_async.launcher.signals import unwinding
from grpo_async.launcher.supervisor import RunOutcome
from grpo_async.processes import machine as machine_module
from grpo_async.processes.assignment import Assignment, Node
from grpo_async.run_directory import RunDir, write_atomically
from grpo_async.servers.engine_choice import EngineChoice, choose_engine

Amend = Callable[[ProcessPlan], ProcessPlan]


def _as_planned(plan: ProcessPlan) -> ProcessPlan:
    return plan


def launch(
    config: ExperimentConfig,
    *,
    resume: str | None = None,
    clean: bool = False,
    dry_run: bool = False,
    node_rank: int | None = None,
    amend: Amend = _as_planned,
    output: Output | None = None,
) -> int:
    """Run an experiment to its end, with all its processes; call it from the main thread.

    Args:
        resume: None begins a new run; "auto" goes on from the newest whole checkpoint, "40" from that of step 40.
        clean: remove an old run of the same name first.
        dry_run: check, print the plan and the resolved configuration, start and write nothing.
        node_rank: of this machine; None: see nodes.choose_node_rank. Of several, node 0 decides all that concerns the run
            directory (`resume`, `clean`); the others follow it.
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
        rank = choose_node_rank(config, node_rank) if node_rank is not None or not dry_run else 0
        engine = choose_engine(config)
        config = with_dtypes(config, engine, machine_module.inspect().gpus)
        launcher = Launcher(
            config, engine, output, amend, check_inputs(config, engine=engine, node_rank=rank, deep=dry_run)
        )
        if rank > 0 and not dry_run:
            return launcher.follow(rank)
        resume, clean = restart_of_job(launcher.run_dir, resume=resume, clean=clean)
        start = check_start(config, resume=resume, clean=clean)
        if dry_run:
            return launcher.describe(rank, start)
        node = leading_node(config)
        with lock(launcher.run_dir):
            start = check_start(config, resume=resume, clean=clean)  # again: another launcher may have had it until now
            return launcher.lead(node, start, clean=clean)


def preflight(config: ExperimentConfig, *, amend: Amend = _as_planned, output: Output | None = None) -> RunOutcome:
    """Start the processes of a run, make the checks before the first step, print them and end everything. Everything is written to
    a temporary run directory; that of `config` is not touched. Of several machines only this one is checked.

    Returns:
        Its exit code is 0 when no check failed, else 1; the checks, if they were made.

    Raises:
        ConfigError, RunError: see `launch`.
    """
    output = output or Output()
    notes: tuple[str, ...] = ()
    with output.reporting():
        if (nodes := config.launch.nodes) > 1:
            alone = config.launch.model_copy(update={"nodes": 1, "rdzv": None, "sharding": "full"})
            config = config.model_copy(update={"launch": alone})
            notes = (f"launch.nodes: {nodes}; the checks are made with the trainer ranks of this machine only",)
        engine = choose_engine(config)
        config = with_dtypes(config, engine, machine_module.inspect().gpus)
        notes = (*check_inputs(config, engine=engine), *notes)
        folder = Path(tempfile.mkdtemp(prefix="grpo-async-preflight-"))
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})
        launcher = Launcher(config, engine, output, amend, notes)
        is_broken = False
        try:
            outcome = launcher.run(Start(resume_step=None), preflight_only=True)
            is_broken = outcome.exit_code == 1 and outcome.checks is None
            if is_broken:  # the logs say more than the error
                outcome = replace(outcome, error=f"{outcome.error}\nthe logs are kept: {launcher.run_dir.logs}")
            report_end(outcome, launcher.run_dir, output)
            return outcome
        finally:
            if not is_broken:
                shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True, slots=True)
class Launcher:
    """One command, whose configuration has been checked. `notes` are shown with the plan."""

    config: ExperimentConfig
    engine: EngineChoice
    output: Output
    amend: Amend
    notes: Sequence[str]

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
        return end_with_report(self.run(start, node=node), self.config, self.run_dir, self.output)

    def run(self, start: Start, *, preflight_only: bool = False, node: Node | None = None) -> RunOutcome:
        """Carry out the plan on this machine, which leads."""
        from grpo_async.config.loader import dump_config

        config, run_dir, node = self.config, self.run_dir, node or Node()
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
                resume_is_named=start.resume_is_named,
                preflight_only=preflight_only,
                node=node,
            )
            plan = self._plan(assignment, free_ports(config), token=token, start=start)
            with writing(run_dir):
                write_atomically(run_dir.plan, plan.describe())
            self.output.start(run_name=config.run.name, directory=run_dir.root, pid=os.getpid(), plan=plan.describe())
            return run_with_display(config, plan, self.output)

    def _plan(self, assignment: Assignment, ports: Sequence[int], *, token: str | None, start: Start) -> ProcessPlan:
        machine = machine_module.inspect()
        leads = assignment.node.rank == 0
        engine = self.engine if leads else SERVERS_ELSEWHERE
        shares = share_gpus(self.config, engine, machine.gpus)
        return self.amend(
            plan_processes(
                self.config,
                engine=engine,
                assignment=assignment,
                ports=ports,
                machine=machine,
                token=token,
                memory=plan_memory(self.config, engine, shares, machine.gpu_bytes),
                notes=(*start.notes, *self.notes) if leads else (),
            )
        )
