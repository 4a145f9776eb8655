"""The plan of a run that is not started, for `validate` and `--dry-run`. Imports nothing that only a run needs."""

from __future__ import annotations

import tempfile
from pathlib import Path

from grpo_async.config import ExperimentConfig
from grpo_async.launcher.plan import ProcessPlan, plan_processes
from grpo_async.launcher.trainer_plan import Places
from grpo_async.processes import machine
from grpo_async.processes.node_place import NodePlace
from grpo_async.rundir import RunDir
from grpo_async.servers.engine_choice import choose_engine


def plan_only(config: ExperimentConfig) -> ProcessPlan:
    """The processes that `config` would start; looks at the machine, not at the files that `config` names."""
    places = dry_run_places(RunDir(config.run_path.absolute()), config)
    return plan_processes(
        config,
        engine=choose_engine(config),
        places=places,
        machine=machine.look(),
        token=None,
        node=dry_run_node(config, 0),
    )


def dry_run_places(run_dir: RunDir, config: ExperimentConfig) -> Places:
    """Names of the right shape; nothing of it is made."""
    private = Path(tempfile.gettempdir()) / "grpo-async-RANDOM"
    return Places(run_dir=run_dir, attempt=run_dir.logs / "attempt_N", private=private, ports=free_ports(config))


def dry_run_node(config: ExperimentConfig, rank: int) -> NodePlace:
    """Nothing is looked up: the machines need not be there. Port 0 stands for one that is chosen at the start."""
    if config.launch.nodes == 1:
        return NodePlace()
    host, _ = config.launch.meeting_point
    return NodePlace(rank=rank, count=config.launch.nodes, address=host, own_address=host if rank == 0 else "")


def free_ports(config: ExperimentConfig) -> tuple[int, ...]:
    """One for each server that the run starts; nothing holds them."""
    if config.inference.urls:
        return ()
    return machine.free_ports(config.inference.host, config.inference.replicas)
