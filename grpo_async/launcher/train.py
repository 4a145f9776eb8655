"""From a configuration to an exit code: check, plan, prepare the run directory, supervise, report.

config -> checks -> plan -> run directory -> supervisor { inference server, torchrun { trainer ranks } } -> summary

User faults are raised (ConfigError) before anything is started. What goes wrong later is reported by `lifecycle` once the
dashboard is closed, and becomes exit code 1.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from grpo_async.checks.config_checks import check_inputs
from grpo_async.cluster.nodes import find_node, leading_node
from grpo_async.cluster.rendezvous import NodeInfo, gather, hosting
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import dump_config
from grpo_async.display.output import Output
from grpo_async.errors import ConfigError
from grpo_async.inference.token import token_from_environment
from grpo_async.launcher.follower import follow
from grpo_async.launcher.gpus import assumed_gpus, fill_dtypes
from grpo_async.launcher.lifecycle import end_with_report, report_end, run_with_display
from grpo_async.launcher.plan import SERVERS_ELSEWHERE, plan_dry, plan_processes
from grpo_async.launcher.prepare import Start, check_start, clear_run_dir, lock, writing
from grpo_async.launcher.reaper import private_folder
from grpo_async.launcher.signals import exit_on_signals
from grpo_async.launcher.supervisor import Cluster, RunOutcome
from grpo_async.processes.addresses import own_urls
from grpo_async.processes.assignment import Assignment, Node, Purpose
from grpo_async.processes.machine import inspect_machine
from grpo_async.run_directory import RunDir
from grpo_async.servers.engine_choice import EngineChoice, choose_engine
from grpo_async.utils.files import write_atomically


def launch(
    config: ExperimentConfig,
    *,
    resume: str | None = None,
    clean: bool = False,
    dry_run: bool = False,
    node_rank: int | None = None,
    master_addr: str | None = None,
    output: Output | None = None,
) -> int:
    """Run an experiment to its end, with all its processes; call it from the main thread.

    Args:
        resume: None begins a new run; "latest" continues from the newest whole checkpoint, "40" from that of step 40.
        clean: remove an old run of the same name first.
        dry_run: check, print the plan and the resolved configuration, start and write nothing.
        node_rank, master_addr: see cluster.nodes. Of several machines node 0 decides all that concerns the run directory
            (`resume`, `clean`); the others follow it.
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
        node = _find_node(config, node_rank, master_addr, dry_run=dry_run)
        engine = SERVERS_ELSEWHERE
        if node.serves:  # a dry run describes the whole cluster, not this machine
            engine = choose_engine(config, is_here=not dry_run or node.is_alone)
        config = _fill_dtypes_on_nodes(config, engine, node, dry_run=dry_run)
        run_dir = RunDir(config.run_path.absolute())
        follows = node.rank > 0 and not dry_run
        start = Start() if follows else check_start(config, resume=resume, clean=clean)  # before what takes seconds
        with output.working("checking the configuration, the data and the rewards ..."):
            notes = check_inputs(config, engine=engine, node_rank=node.rank, trains=node.trains, deep=dry_run)
        if follows:
            outcome = follow(config, run_dir, output, node=node, engine=engine, notes=notes)
            return report_end(outcome, run_dir, output)
        if dry_run:
            plan = plan_dry(
                config, node, resume_step=start.resume_step, plans_memory=True, notes=[*start.notes, *notes]
            )
            output.answer(f"{plan.describe()}\n{dump_config(config)}dry run: nothing was started or written")
            return 0
        node = leading_node(node)
        with lock(run_dir):
            start = check_start(config, resume=resume, clean=clean)  # again: another launcher may have had it until now
            with writing(run_dir):
                clear_run_dir(run_dir, start)
            outcome = lead_run(config, engine, output, start=start, node=node, notes=notes)
            return end_with_report(outcome, config, run_dir, output)


def _find_node(config: ExperimentConfig, node_rank: int | None, master_addr: str | None, *, dry_run: bool) -> Node:
    """This machine in the run. A dry run needs no scheduler: where nothing gives it a rank, it is node 0's."""
    try:
        return find_node(config, node_rank=node_rank, master_addr=master_addr)
    except ConfigError:
        if not dry_run or node_rank is not None or master_addr is not None:
            raise
        return Node(num_train=config.launch.nodes.train, num_infer=config.launch.nodes.infer)


def _fill_dtypes_on_nodes(
    config: ExperimentConfig, engine: EngineChoice, node: Node, *, dry_run: bool
) -> ExperimentConfig:
    """The config with its dtypes filled in. All machines of a cluster must get the same, because they compare configs."""
    gpus = inspect_machine().gpus
    if not node.is_alone:
        engine = choose_engine(config, is_here=False)
        gpus = gpus or (assumed_gpus(config, engine) if dry_run else ())
        engine = replace(engine, on_gpu=engine.on_gpu and bool(gpus))
    return fill_dtypes(config, engine, gpus)


def lead_run(
    config: ExperimentConfig,
    engine: EngineChoice,
    output: Output,
    *,
    start: Start = Start(),  # noqa: B008 - it is frozen
    purpose: Purpose = "train",
    node: Node | None = None,
    notes: Sequence[str],
) -> RunOutcome:
    """Carry out a run as the machine that leads, in its run directory, which this process holds.

    Args:
        config: it has been checked.
        node: None: the only machine.
        notes: shown with the plan.
    """
    run_dir, node = RunDir(config.run_path.absolute()), node or Node()
    with writing(run_dir):
        run_dir.create(dump_config(config))
        attempt = run_dir.new_attempt()
    with exit_on_signals(), ExitStack() as stack:
        token = token_from_environment()  # that of running servers, which need not ask for one
        if not config.inference.urls or not node.is_alone:
            with writing(run_dir):
                token = stack.enter_context(run_dir.new_token(None if node.is_alone else token))
        assignment = Assignment(
            run_dir=run_dir,
            attempt_dir=attempt,
            private_dir=stack.enter_context(private_folder()),
            resume_step=start.resume_step,
            resume_is_named=start.resume_is_named,
            purpose=purpose,
            node=node,
        )
        cluster = None
        if node.is_alone:
            urls = own_urls(config, config.inference.host)
        else:
            assert token is not None
            launchers = stack.enter_context(hosting(node, token))
            own = NodeInfo.of(config, node, engine)
            nodes = gather(launchers, config, assignment, own, output.say)
            cluster = Cluster(launchers=launchers, nodes=nodes)
            urls = tuple(url for each in (own, *nodes) for url in each.urls)
            if (serving := next((n for n in nodes if n.urls), None)) is not None and engine is SERVERS_ELSEWHERE:
                engine = EngineChoice(engine=serving.engine, reason=f"as on {serving.name}", on_gpu=serving.on_gpu)
        plan = plan_processes(
            config,
            engine=engine,
            assignment=assignment.model_copy(update={"server_urls": urls}),
            token=token,
            notes=(*start.notes, *notes),
        )
        with writing(run_dir):
            write_atomically(run_dir.plan, plan.describe())
        output.start(run_name=config.run.name, directory=run_dir.root, pid=os.getpid(), plan=plan.describe())
        return run_with_display(config, plan, output, cluster)
