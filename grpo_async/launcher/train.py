"""From a configuration to an exit code: check, plan, prepare the run directory, supervise, report.

config -> checks -> plan -> run directory -> supervisor { inference server, torchrun { trainer ranks } } -> summary

User faults are raised (ConfigError) before anything is started. What goes wrong later is printed to stderr here,
because only here is it known when the live panel is gone, and becomes exit code 1.
"""

from __future__ import annotations

import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from grpo_async.checks.config_checks import check_inputs
from grpo_async.cluster.nodes import Rendezvous, find_rendezvous, leading_node
from grpo_async.cluster.rendezvous import NodeInfo, gather, hosting
from grpo_async.cluster.schedulers import job_note
from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import NodesSection
from grpo_async.display.output import Output
from grpo_async.errors import ConfigError
from grpo_async.inference.token import token_from_environment
from grpo_async.launcher.follower import follow
from grpo_async.launcher.gpus import assumed_gpus, with_dtypes
from grpo_async.launcher.lifecycle import end_with_report, report_end, run_with_display
from grpo_async.launcher.plan import SERVERS_ELSEWHERE, ProcessPlan, own_urls, plan_dry, plan_processes
from grpo_async.launcher.prepare import Start, check_start, empty, lock, set_aside_broken, writing
from grpo_async.launcher.reaper import private_folder
from grpo_async.launcher.signals import unwinding
from grpo_async.launcher.supervisor import Cluster, RunOutcome
from grpo_async.processes import machine as machine_module
from grpo_async.processes.assignment import Assignment, Node, Purpose
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
    master_addr: str | None = None,
    amend: Amend = _as_planned,
    output: Output | None = None,
) -> int:
    """Run an experiment to its end, with all its processes; call it from the main thread.

    Args:
        resume: None begins a new run; "latest" continues from the newest whole checkpoint, "40" from that of step 40.
        clean: remove an old run of the same name first.
        dry_run: check, print the plan and the resolved configuration, start and write nothing.
        node_rank: of this machine, like `master_addr` see cluster.nodes. Of several, node 0 decides all that concerns the run
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
        rendezvous = _find_rendezvous(config, node_rank, master_addr, dry_run=dry_run)
        nodes = config.launch.nodes
        engine = SERVERS_ELSEWHERE
        if rendezvous.rank in nodes.serving:  # a dry run of several machines tells of them, not of this one
            engine = choose_engine(config, is_here=not dry_run or nodes.count == 1)
        config = _with_dtypes(config, engine, dry_run=dry_run)
        notes = check_inputs(
            config, engine=engine, node_rank=rendezvous.rank, trains=rendezvous.rank < nodes.train, deep=dry_run
        )
        launcher = Launcher(config, engine, output, amend, notes)
        if rendezvous.rank > 0 and not dry_run:
            outcome = follow(config, launcher.run_dir, output, rendezvous=rendezvous, engine=engine, amend=amend)
            return report_end(outcome, launcher.run_dir, output)
        start = check_start(config, resume=resume, clean=clean)
        if dry_run:
            return launcher.describe(rendezvous, start)
        node = leading_node(config, rendezvous)
        with lock(launcher.run_dir):
            start = check_start(config, resume=resume, clean=clean)  # again: another launcher may have had it until now
            return launcher.lead(node, start, clean=clean)


def _find_rendezvous(
    config: ExperimentConfig, node_rank: int | None, master_addr: str | None, *, dry_run: bool
) -> Rendezvous:
    """A dry run needs no scheduler: it is node 0 where nothing says another."""
    try:
        return find_rendezvous(config, node_rank=node_rank, master_addr=master_addr)
    except ConfigError:
        if not dry_run or node_rank is not None or master_addr is not None:
            raise
        return Rendezvous()


def _with_dtypes(config: ExperimentConfig, engine: EngineChoice, *, dry_run: bool) -> ExperimentConfig:
    """The same on every machine of a cluster, whichever of them has servers: they compare their configurations."""
    gpus = machine_module.inspect().gpus
    if config.launch.nodes.count > 1:
        engine = choose_engine(config, is_here=False)
        gpus = gpus or (assumed_gpus(config, engine) if dry_run else ())
        engine = replace(engine, on_gpu=engine.on_gpu and bool(gpus))
    return with_dtypes(config, engine, gpus)


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
        if (nodes := config.launch.nodes).count > 1:
            shares = {"colocate": True} if nodes.infer else {}
            alone = {"nodes": NodesSection(), "rdzv": None, "sharding": "full", **shares}
            config = config.model_copy(
                update={
                    "launch": config.launch.model_copy(update=alone),
                    "inference": config.inference.model_copy(update={"replicas": 1}),
                }
            )
            notes = (
                f"launch.nodes: {nodes.count} machines; the checks run on this one only, with its ranks and one server",
            )
        engine = choose_engine(config)
        config = with_dtypes(config, engine, machine_module.inspect().gpus)
        notes = (*check_inputs(config, engine=engine), *notes)
        folder = Path(tempfile.mkdtemp(prefix="grpo-async-preflight-"))
        config = config.model_copy(update={"run": config.run.model_copy(update={"dir": folder})})
        launcher = Launcher(config, engine, output, amend, notes)
        is_broken = False
        try:
            outcome = launcher.run(Start(resume_step=None), purpose="preflight")
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

    def describe(self, rendezvous: Rendezvous, start: Start) -> int:
        """Print the plan of this machine, with what the others do, and the configuration."""
        from grpo_async.config.loader import dump_config

        plan = plan_dry(
            self.config,
            rendezvous,
            machine=machine_module.inspect(),
            resume_step=start.resume_step,
            plans_memory=True,
            notes=(*start.notes, *self.notes),
        )
        plan = self.amend(plan)
        self.output.answer(f"{plan.describe()}\n{dump_config(self.config)}dry run: nothing was started or written")
        return 0

    def lead(self, node: Node, start: Start, *, clean: bool) -> int:
        """Train in the run directory, which is ours."""
        with writing(self.run_dir):
            if clean or start.is_reused:
                empty(self.run_dir, keeps_logs=not clean)
            set_aside_broken(self.run_dir, start)
        return end_with_report(self.run(start, node=node), self.config, self.run_dir, self.output)

    def run(self, start: Start, *, purpose: Purpose = "train", node: Node | None = None) -> RunOutcome:
        """Carry out the plan on this machine, which leads."""
        from grpo_async.config.loader import dump_config

        config, run_dir, node = self.config, self.run_dir, node or Node()
        with writing(run_dir):
            run_dir.create(dump_config(config))
            attempt = run_dir.new_attempt()
            if (job := os.environ.get("SLURM_JOB_ID")) is not None:  # for the job's script, should it be queued again
                write_atomically(job_note(attempt), f"{job}\n")
        with unwinding(), ExitStack() as stack:
            token = token_from_environment()  # that of running servers, which need not ask for one
            if not config.inference.urls or not node.is_alone:
                with writing(run_dir):
                    token = stack.enter_context(run_dir.new_token(None if node.is_alone else token))
            assignment = Assignment(
                run_dir=run_dir,
                attempt_dir=attempt,
                private=stack.enter_context(private_folder()),
                resume_step=start.resume_step,
                resume_is_named=start.resume_is_named,
                purpose=purpose,
                node=node,
            )
            cluster, engine = None, self.engine
            urls = own_urls(config, node.own_address or config.inference.host) if node.serves else ()
            if not node.is_alone:
                assert token is not None
                launchers = stack.enter_context(hosting(config, node, token))
                own = NodeInfo(rank=0, host=socket.gethostname(), urls=urls, engine=engine.engine, on_gpu=engine.on_gpu)
                members = gather(launchers, config, assignment, own, self.output.say)
                cluster = Cluster(launchers=launchers, members=members)
                urls = (*urls, *(url for member in members for url in member.urls))
                if (serving := next((m for m in members if m.urls), None)) is not None and engine is SERVERS_ELSEWHERE:
                    engine = EngineChoice(engine=serving.engine, reason=f"as on {serving.name}", on_gpu=serving.on_gpu)
            plan = self._plan(assignment.model_copy(update={"server_urls": urls}), engine, token=token, start=start)
            with writing(run_dir):
                write_atomically(run_dir.plan, plan.describe())
            self.output.start(run_name=config.run.name, directory=run_dir.root, pid=os.getpid(), plan=plan.describe())
            return run_with_display(config, plan, self.output, cluster)

    def _plan(self, assignment: Assignment, engine: EngineChoice, *, token: str | None, start: Start) -> ProcessPlan:
        return self.amend(
            plan_processes(
                self.config,
                engine=engine,
                assignment=assignment,
                machine=machine_module.inspect(),
                token=token,
                notes=(*start.notes, *self.notes),
            )
        )
