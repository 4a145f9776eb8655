"""The processes of a run, as data: commands, environment, ports, threads, devices.

    plan = plan_processes(config, engine=..., assignment=..., token=...)
    print(plan.describe())

One machine: the trainer's ranks meet through private files, and by default nothing listens beyond loopback. Several: each has its
part of the plan, ranks or servers; they meet in one store that node 0's launcher opens on one address (cluster.launcher_store).
Secrets travel by environment only, and `describe` shows neither the token nor anything else of the environment.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeAlias
from urllib.parse import urlsplit

from grpo_async.cluster.nodes import socket_names
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import set_options
from grpo_async.errors import ConfigError
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.launcher.gpus import (
    GpuShares,
    assumed_gpus,
    fill_dtypes,
    gpus_needed,
    plan_transport,
    share_gpus,
    trains_on_gpu,
)
from grpo_async.launcher.memory import MemoryPlan, plan_memory
from grpo_async.launcher.torchrun import RENDEZVOUS_BACKEND
from grpo_async.processes.addresses import own_urls
from grpo_async.processes.assignment import ASSIGNMENT_VARIABLE, Assignment, Node
from grpo_async.processes.machine import Machine, inspect_machine
from grpo_async.run_directory import RunDir, attempt_config
from grpo_async.servers.engine_choice import EngineChoice, choose_engine
from grpo_async.utils.network import LOOPBACK, WILDCARDS
from grpo_async.utils.text import count

Fact: TypeAlias = tuple[str, str]
"""A further line of a plan's description: a name and a text."""

_SOCKET_FOLDER_BYTES = 70  # with "/" and the UUID by which vLLM names a socket 107, which Linux takes

SERVERS_ELSEWHERE = EngineChoice(engine="external", reason="other machines of the run serve")
"""The engine of a machine that only trains."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One child. `environment` is added to the launcher's, `threads` are the CPU threads of each process, `memory` says what
    each takes (see MemoryPlan)."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log_name: str
    num_processes: int
    threads: int
    gpus: tuple[str, ...] = ()
    memory: str = ""

    @property
    def device(self) -> str:
        """("0", "1") -> "GPU 0,1"; without GPUs "CPU"."""
        return f"GPU {','.join(self.gpus)}" if self.gpus else "CPU"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """Everything that one machine starts. `servers` is empty when others run them, `trainer` is None where it only serves."""

    run_name: str
    engine: EngineChoice
    assignment: Assignment
    servers: tuple[ProcessSpec, ...]
    trainer: ProcessSpec | None
    num_gpus: int
    """GPUs that this machine has for the run."""
    facts: tuple[Fact, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        return (*self.servers, *([] if self.trainer is None else [self.trainer]))

    def describe(self) -> str:
        """The plan for humans; also the content of plan.txt."""
        assignment = self.assignment
        start = {
            "evaluation": "evaluation only",
            "train": "from the beginning"
            if assignment.resume_step is None
            else f"from the checkpoint of step {assignment.resume_step}",
        }[assignment.purpose]
        is_external = self.engine.engine == "external" and self.engine is not SERVERS_ELSEWHERE
        external = " (not started by this run)" if is_external else ""
        lines = [
            f"run        {self.run_name}, {start}",
            f"directory  {assignment.run_dir.root}",
            f"engine     {self.engine.engine}: {self.engine.reason}",
            *(f"server     {url}{external}" for url in assignment.server_urls if urlsplit(url).port != 0),
            *(f"{name:<10} {text}" for name, text in self.facts),
        ]
        for spec in self.processes:
            lines += [
                "",
                f"{spec.name}: {count(spec.num_processes, 'process')}, {count(spec.threads, 'CPU thread')} each, {spec.device}",
                f"  command  {shlex.join(spec.command)}",
                *([f"  memory   {spec.memory}"] if spec.memory else []),
                f"  log      {assignment.attempt_dir / spec.log_name}",
            ]
        if self.notes:
            lines += ["", *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"


def plan_dry(
    config: ExperimentConfig,
    node: Node | None = None,
    *,
    machine: Machine | None = None,
    resume_step: int | None = None,
    plans_memory: bool = False,
    notes: Sequence[str] = (),
) -> ProcessPlan:
    """Plan a run without starting it. Names are placeholders: nothing is made or looked up, and port 0 means one that is chosen
    at the start. The other machines of a cluster need not be there: they are assumed to have what the configuration needs.

    Args:
        node: None: node 0.
        machine: None: this one.
        plans_memory: estimate memory, for which the model's files are read.
    """
    nodes, machine = config.launch.nodes, machine or inspect_machine()
    node = node or Node(num_train=nodes.train, num_infer=nodes.infer)
    engine = choose_engine(config, is_here=node.is_alone)
    is_inspected = node.is_alone or bool(machine.gpus)
    hosts = [config.inference.host]
    if not node.is_alone:
        names = [node.address or "NODE_0", *(f"NODE_{rank}" for rank in range(1, node.count))]
        node = node.model_copy(update={"address": names[0], "own_address": names[node.rank]})
        machine = replace(machine, gpus=machine.gpus or assumed_gpus(config, engine))
        hosts = [names[rank] for rank in nodes.serving]
    config = fill_dtypes(config, engine, machine.gpus)
    ports = (0,) * config.inference.replicas if config.launch.server_port is None else None
    run_dir = RunDir(config.run_path.absolute())
    assignment = Assignment(
        run_dir=run_dir,
        attempt_dir=run_dir.attempt("N"),
        private_dir=Path(tempfile.gettempdir()) / "grpo-async-run-RANDOM",
        server_urls=tuple(url for host in hosts for url in own_urls(config, host, ports=ports)),
        resume_step=resume_step,
        node=node,
    )
    return plan_processes(
        config,
        engine=engine,
        assignment=assignment,
        machine=machine,
        token=None,
        plans_memory=plans_memory and is_inspected,
        notes=notes,
    )


def plan_processes(
    config: ExperimentConfig,
    *,
    engine: EngineChoice,
    assignment: Assignment,
    token: str | None,
    machine: Machine | None = None,
    plans_memory: bool = True,
    notes: Sequence[str] = (),
) -> ProcessPlan:
    """Plan the processes of this machine: its servers, and torchrun with its ranks.

    Args:
        engine: SERVERS_ELSEWHERE on a machine that does not serve and does not lead.
        assignment: of node 0, without `transport`, which is planned here; of another machine, whole. `server_urls` are those of all
            servers that the run starts, in the order of the machines; they keep them over restarts.
        token: guards the servers; None only with servers that ask for none.
        machine: None: this one.
        plans_memory: see `plan_dry`.
        notes: shown with the plan, after its own.

    Raises:
        ConfigError: there are too few GPUs, or they cannot be divided (see launcher.memory), or `weights.transport` or
            `inference.vllm.sleep_while_training` is impossible here, or $TMPDIR is too long for the sockets of vLLM.
    """
    node, machine = assignment.node, machine or inspect_machine()
    shares = share_gpus(config, engine, machine.gpus, node)
    memory = plan_memory(config, engine, shares, machine.gpu_bytes) if plans_memory else MemoryPlan()
    facts = list(_nodes_facts(config, engine, machine, node))
    if node.rank == 0 and node.trains:
        if config.inference.vllm.sleep_while_training and not (engine.engine == "vllm" and engine.on_gpu):
            raise ConfigError(
                f"inference.vllm.sleep_while_training: only a vLLM that this run starts on a GPU can sleep, and the engine is "
                f"{engine.engine}{'' if engine.on_gpu else ' without a GPU'}; leave the setting out"
            )
        transport, reason = plan_transport(config, engine, shares, node)
        urls = assignment.server_urls or tuple(config.inference.urls)
        assignment = assignment.model_copy(update={"server_urls": urls, "transport": transport})
        facts += _facts(config, f"{transport}: {reason}")
    environment = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(machine.working_dir), machine.python_path])),
        **({TOKEN_VARIABLE: token} if token else {}),
        **socket_names(node.own_address),
    }
    if sys.platform == "linux" and engine.engine != "external" and node.is_alone and node.trains:
        environment["NCCL_SOCKET_IFNAME"] = "lo"  # everything is here: NCCL must not meet on another address
    servers = _servers(config, engine, assignment, machine, environment, memory, shares)
    trainer = None
    if node.trains:
        assignment = assignment.model_copy(update={"on_gpu": trains_on_gpu(config, machine.gpus)})
        trainer = _trainer(config, assignment, machine, environment, shares.trainer, memory=memory.trainer)
    plan = ProcessPlan(
        run_name=config.run.name,
        engine=engine,
        assignment=assignment,
        servers=servers,
        trainer=trainer,
        num_gpus=len(machine.gpus),
        facts=tuple(facts),
    )
    own_notes = _own_notes(config, machine, plan.processes, shares.shared)
    return replace(plan, notes=(*shares.notes, *memory.notes, *own_notes, *notes))


def first_server(config: ExperimentConfig, node: Node) -> int:
    """Index of the first server of a machine that serves: with {train: 2, infer: 2} and 8 replicas 8 on node 3."""
    return config.launch.nodes.serving.index(node.rank) * config.inference.replicas


def _servers(
    config: ExperimentConfig,
    engine: EngineChoice,
    assignment: Assignment,
    machine: Machine,
    common: Mapping[str, str],
    memory: MemoryPlan,
    shares: GpuShares,
) -> tuple[ProcessSpec, ...]:
    """The servers of this machine, one for each entry of `shares.servers`."""
    if not shares.servers:
        return ()
    node, urls, sockets = assignment.node, assignment.server_urls, assignment.private_dir
    if engine.engine == "vllm" and len(os.fsencode(sockets)) > _SOCKET_FOLDER_BYTES:
        raise ConfigError(
            f"the path of the temporary folder is too long for the sockets of vLLM: {sockets}; set TMPDIR=/tmp"
        )
    # config.yaml stays what the user wrote, so that it can be resumed where the GPUs are shared in another way, or not
    overrides = ["inference.replicas=1"] if len(shares.servers) > 1 else []
    if memory.cache_mb is not None:
        overrides.append(f"inference.vllm.kv_cache_mb={memory.cache_mb}")
    if not node.is_alone and config.inference.host not in WILDCARDS:
        overrides.append(f"inference.host={node.own_address}")
    command = "serve-vllm" if engine.engine == "vllm" else "serve-embedded"
    is_only = len(urls) == 1
    return tuple(
        ProcessSpec(
            name="inference server" if is_only else f"inference server {index}",
            command=(
                *(machine.python, "-m", "grpo_async", command, str(attempt_config(assignment.attempt_dir))),
                *("--port", str(urlsplit(urls[index]).port or 0)),
                *set_options(overrides),
            ),
            environment={
                **_environment(common, config.inference.threads, own),
                # unix sockets between vLLM's processes: by default in a folder that everybody can list
                **({"VLLM_RPC_BASE_PATH": str(sockets)} if engine.engine == "vllm" else {}),
            },
            log_name="server.log" if is_only else f"server_{index}.log",
            num_processes=1,
            threads=config.inference.threads,
            gpus=own or (),
            memory=memory.server,
        )
        for index, own in enumerate(shares.servers, start=first_server(config, node))
    )


def _environment(common: Mapping[str, str], threads: int, gpus: tuple[str, ...] | None) -> dict[str, str]:
    """Environment of one process: thread counts of OpenMP, MKL and OpenBLAS, and the GPUs that it may see (None: as they are)."""
    libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return {**common, **dict.fromkeys(libraries, str(threads)), **visible}


def _trainer(
    config: ExperimentConfig,
    assignment: Assignment,
    machine: Machine,
    common: Mapping[str, str],
    gpus: tuple[str, ...] | None,
    *,
    memory: str,
) -> ProcessSpec:
    """torchrun with the ranks of this machine."""
    launch, node = config.launch, assignment.node
    environment = {
        **_environment(common, launch.trainer_threads, gpus),
        # a generator of rows that walks a set then gives the same rows to a resumed run
        "PYTHONHASHSEED": "0",
        ASSIGNMENT_VARIABLE: assignment.model_dump_json(),
    }
    options = {
        "--nnodes": node.num_train,
        "--nproc-per-node": launch.num_trainer_ranks,
        "--max-restarts": 0,
        "--rdzv-id": config.run.name,
        # without an address the host's name is looked up
        "--local-addr": node.own_address or LOOPBACK,
        # without a folder it makes one in the temporary directory, and leaves it there
        "--log-dir": assignment.private_dir / "torchrun",
    }
    if node.num_train == 1:
        options |= {
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": assignment.private_dir / "rendezvous",
            "--rdzv-conf": "store_type=file",
        }
        # torchrun would otherwise listen on every interface, for a store that the ranks do not use
        environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        if sys.platform == "linux":
            environment["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        options |= {
            "--rdzv-backend": RENDEZVOUS_BACKEND,
            "--rdzv-endpoint": node.endpoint,
            "--rdzv-conf": f"rank={node.rank},timeout={max(1, round(launch.rdzv_timeout_s))}",
        }
    return ProcessSpec(
        name="trainer",
        command=(
            *(machine.python, "-m", "grpo_async.launcher.torchrun"),
            *(str(word) for option in options.items() for word in option),
            *("-m", "grpo_async.trainer.main"),
        ),
        environment=environment,
        log_name="trainer.log" if node.rank == 0 else f"trainer_node{node.rank}.log",
        num_processes=launch.num_trainer_ranks,
        threads=launch.trainer_threads,
        gpus=gpus or (),
        memory=memory,
    )


def _nodes_facts(config: ExperimentConfig, engine: EngineChoice, machine: Machine, node: Node) -> Iterator[Fact]:
    """Which machine does what; empty on a single machine. GPUs are counted on each, which is assumed to have what it needs."""
    if node.is_alone:
        return
    ranks, replicas = config.launch.num_trainer_ranks, config.inference.replicas
    gpus = tuple(map(str, range(gpus_needed(config, engine)))) if machine.gpus else ()
    yield "nodes", f"{node.count}, which meet at {node.endpoint}; sharding: {config.launch.sharding}"
    for rank in range(node.count):
        one = node.model_copy(update={"rank": rank})
        shares = share_gpus(config, engine, gpus, one)
        parts = ["leads"] if rank == 0 else []
        if one.trains:
            last = f"s {rank * ranks}-{(rank + 1) * ranks - 1}" if ranks > 1 else f" {rank}"
            parts.append(f"trainer rank{last}{_on_gpus(shares.trainer)}")
        if one.serves and not config.inference.urls:
            own = enumerate(shares.servers or (None,) * replicas, start=first_server(config, one))
            servers = [f"{index}{_on_gpus(taken)}" for index, taken in own]
            parts.append(f"server{'s' if replicas > 1 else ''} {', '.join(servers)}")
        yield f"node {rank}", f"{'; '.join(parts)}{' (this machine)' if rank == node.rank else ''}"
    if names := socket_names(node.own_address):
        interfaces = ", ".join(sorted(set(names.values())))
        yield "interface", f"{interfaces} ({node.own_address}), for {' and '.join(sorted(names))}"


def _on_gpus(gpus: tuple[str, ...] | None) -> str:
    return f" on GPU {','.join(gpus)}" if gpus else ""


def _facts(config: ExperimentConfig, weights: str) -> Iterator[Fact]:
    yield "precision", config.precision
    yield "weights", f"{weights}; requests in flight: {config.weights.mode} (weights.mode)"


def _own_notes(
    config: ExperimentConfig, machine: Machine, specs: Sequence[ProcessSpec], shared_gpus: Sequence[str]
) -> Iterator[str]:
    threads = sum(spec.num_processes * spec.threads for spec in specs)
    if threads > machine.num_cpus:
        yield (
            f"{threads} compute threads on {count(machine.num_cpus, 'CPU')} slow each other down; "
            "see launch.trainer_threads, launch.num_trainer_ranks, inference.threads"
        )
    if config.inference.vllm.sleep_while_training and not shared_gpus:
        yield "inference.vllm.sleep_while_training: the servers share no GPU with the trainer, so sleeping has no benefit"
    if (warmup := config.optimizer.warmup_steps) > config.warmup_steps:
        yield f"optimizer.warmup_steps: {warmup} is cut to {config.warmup_steps}: the run has no more steps"
