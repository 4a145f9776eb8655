"""The trainer's process on one machine, as data: torchrun's command line and the environment of its ranks. Pure.

One machine: the ranks meet through private files, and nothing listens beyond loopback. Several: torchrun on each of them, and
one store that node 0's torchrun opens on the address of `launch.rdzv` and on no other (torchrun_entry).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_async.config import ExperimentConfig
from grpo_async.inference.surface import TransportKind
from grpo_async.launcher.torchrun import RENDEZVOUS_BACKEND
from grpo_async.processes.assignment import (
    ATTEMPT_VARIABLE,
    PREFLIGHT_VARIABLE,
    RESUME_VARIABLE,
    RUN_DIR_VARIABLE,
    SERVER_URLS_VARIABLE,
    STORE_VARIABLE,
    TRANSPORT_VARIABLE,
)
from grpo_async.processes.control import CONTROL_VARIABLE
from grpo_async.processes.heartbeat import HEARTBEAT_VARIABLE
from grpo_async.processes.machine import Machine
from grpo_async.processes.node_place import NODE_RANK_VARIABLE, NodePlace
from grpo_async.rundir import RunDir


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a run reads and writes. `private` is a folder that only this user can enter; `ports` are those of the spawned
    servers, which keep them over restarts."""

    run_dir: RunDir
    attempt: Path
    private: Path
    ports: tuple[int, ...]

    @property
    def control_socket(self) -> Path:
        return self.private / "control"

    @property
    def heartbeat(self) -> Path:
        return self.private / "heartbeat"

    @property
    def rendezvous(self) -> Path:
        return self.private / "rendezvous"

    @property
    def store(self) -> Path:
        return self.private / "store"

    @property
    def torchrun_logs(self) -> Path:
        """Of its own; without a place it makes a folder in the temporary directory, and leaves it there."""
        return self.private / "torchrun"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One child. `environment` holds what is added to the caller's."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log_name: str
    num_processes: int
    threads: int
    """CPU threads of each process."""
    gpus: tuple[str, ...] = ()


def trainer_spec(
    config: ExperimentConfig,
    places: Places,
    machine: Machine,
    common: Mapping[str, str],
    *,
    node: NodePlace,
    gpus: tuple[str, ...] | None,
    server_urls: Sequence[str],
    transport: TransportKind,
    resume_step: int | None,
    preflight_only: bool = False,
) -> ProcessSpec:
    """torchrun with the ranks of this machine.

    Args:
        common: environment that every process of the run gets.
        gpus: see layout.GpuShares.
    """
    return ProcessSpec(
        name="trainer",
        command=_torchrun(config, places, machine, node),
        environment={
            **common,
            **threads_environment(config.launch.trainer_threads),
            **visible_gpus(gpus),
            **(_meeting_alone(places) if node.is_alone else {}),
            # a generator of rows that walks a set then gives the same rows to a resumed run
            "PYTHONHASHSEED": "0",
            NODE_RANK_VARIABLE: str(node.rank),
            RUN_DIR_VARIABLE: str(places.run_dir.root),
            ATTEMPT_VARIABLE: str(places.attempt),
            HEARTBEAT_VARIABLE: str(places.heartbeat),
            SERVER_URLS_VARIABLE: json.dumps(list(server_urls)),
            TRANSPORT_VARIABLE: transport,
            **({CONTROL_VARIABLE: str(places.control_socket)} if node.rank == 0 else {}),
            RESUME_VARIABLE: "" if resume_step is None else str(resume_step),
            **({PREFLIGHT_VARIABLE: "1"} if preflight_only else {}),
        },
        log_name="trainer.log" if node.rank == 0 else f"trainer_node{node.rank}.log",
        num_processes=config.launch.num_trainer_ranks,
        threads=config.launch.trainer_threads,
        gpus=gpus or (),
    )


def visible_gpus(gpus: tuple[str, ...] | None) -> dict[str, str]:
    """Hide all other GPUs from a process; nothing where `gpus` is None."""
    return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def threads_environment(count: int) -> dict[str, str]:
    """CPU threads of a process, for every library that has a say."""
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(count))


def _meeting_alone(places: Places) -> dict[str, str]:
    return {
        # torchrun would otherwise listen on every interface, for a store that the ranks do not use
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
        STORE_VARIABLE: str(places.store),
    }


def _torchrun(config: ExperimentConfig, places: Places, machine: Machine, node: NodePlace) -> tuple[str, ...]:
    launch = config.launch
    if node.is_alone:
        meeting = (
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            str(places.rendezvous),
            "--rdzv-conf",
            "store_type=file",
        )
        own_address = "127.0.0.1"  # without it the host's name is looked up
    else:
        host = f"[{node.address}]" if ":" in node.address else node.address
        settings = f"rank={node.rank},timeout={max(1, round(launch.rdzv_timeout_s))}"
        meeting = (
            *("--rdzv-backend", RENDEZVOUS_BACKEND),
            *("--rdzv-endpoint", f"{host}:{node.store_port}", "--rdzv-conf", settings),
        )
        own_address = node.own_address
    return (
        *(machine.python, "-m", "grpo_async.launcher.torchrun"),
        *("--nnodes", str(node.count), "--nproc-per-node", str(launch.num_trainer_ranks), "--max-restarts", "0"),
        *meeting,
        *("--rdzv-id", config.run.name, "--local-addr", own_address),
        *("--log-dir", str(places.torchrun_logs)),
        *("-m", "grpo_async.trainer.main"),
    )
