"""The processes of a run, as data: commands, environment, ports, threads, devices.

    plan = plan_processes(config, engine=..., assignment=..., machine=...)
    print(plan.describe())

One machine: the trainer's ranks meet through private files, and nothing listens beyond loopback. Several: torchrun on each of
them, and one store that node 0's torchrun opens on the address of `launch.rdzv` and on no other (launcher.torchrun). Secrets
travel by environment only, and `describe` shows neither the token nor anything else of the environment.
"""

from __future__ import annotations

import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_async.cluster.nodes import socket_names
from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.inference.api import TOKEN_VARIABLE
from grpo_async.launcher.gpus import plan_transport, share_gpus, with_dtypes
from grpo_async.launcher.memory import MemoryPlan
from grpo_async.launcher.torchrun import RENDEZVOUS_BACKEND
from grpo_async.processes import machine as machine_module
from grpo_async.processes.assignment import ASSIGNMENT_VARIABLE, Assignment, Node
from grpo_async.processes.machine import Machine
from grpo_async.run_directory import RunDir, attempt_config
from grpo_async.servers.engine_choice import EngineChoice, choose_engine
from grpo_async.utils.network import host_in_url

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # to connect to instead

SERVERS_ELSEWHERE = EngineChoice(engine="external", reason="node 0 looks after the servers")
"""On a machine that follows node 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """One child. `environment` holds what is added to the caller's, `threads` are the CPU threads of each process, `memory` is what
    one takes by estimate."""

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log_name: str
    num_processes: int
    threads: int
    gpus: tuple[str, ...] = ()
    memory: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """Everything that is started. `servers` is empty when `inference.urls` names some that run already."""

    run_name: str
    engine: EngineChoice
    assignment: Assignment
    servers: tuple[ProcessSpec, ...]
    trainer: ProcessSpec
    num_gpus: int | None = None
    """That this machine has for the run; None: not known."""
    facts: tuple[tuple[str, str], ...] = ()
    """Further lines of the description: weights, TLS; (name, text)."""
    notes: tuple[str, ...] = ()

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        return (*self.servers, self.trainer)

    def describe(self) -> str:
        """The plan for humans; also the content of plan.txt."""
        given = self.assignment
        start = (
            "from the beginning" if given.resume_step is None else f"from the checkpoint of step {given.resume_step}"
        )
        if given.preflight_only:
            start = "checks only" if self.trainer.name == "trainer" else f"{self.trainer.name} only"
        external = "" if self.servers or self.engine is SERVERS_ELSEWHERE else " (not started by this run)"
        lines = [
            f"run        {self.run_name}, {start}",
            f"directory  {given.run_dir.root}",
            f"engine     {self.engine.engine}: {self.engine.reason}",
            *(f"server     {url}{external}" for url in given.server_urls),
            *(f"{name:<10} {text}" for name, text in self.facts),
        ]
        for spec in self.processes:
            where = f"GPU {','.join(spec.gpus)}" if spec.gpus else "CPU"
            processes = "process" if spec.num_processes == 1 else "processes"
            threads = "CPU thread" if spec.threads == 1 else "CPU threads"
            lines += [
                "",
                f"{spec.name}: {spec.num_processes} {processes}, {spec.threads} {threads} each, {where}",
                f"  command  {shlex.join(spec.command)}",
                *([f"  memory   by estimate {spec.memory}"] if spec.memory else []),
                f"  log      {given.attempt_dir / spec.log_name}",
            ]
        if self.notes:
            lines += ["", *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"


def plan_only(config: ExperimentConfig) -> ProcessPlan:
    """The processes that `config` would start; looks at the machine, not at the files that `config` names."""
    machine, engine = machine_module.inspect(), choose_engine(config)
    return plan_processes(
        with_dtypes(config, engine, machine.gpus),
        engine=engine,
        assignment=dry_assignment(config, node_rank=0),
        ports=free_ports(config),
        machine=machine,
        token=None,
    )


def dry_assignment(config: ExperimentConfig, *, node_rank: int, resume_step: int | None = None) -> Assignment:
    """Of a run that is not started: names of the right shape. Nothing is made or looked up; port 0 stands for one that is chosen at
    the start, and the other machines need not be there."""
    run_dir = RunDir(config.run_path.absolute())
    node = Node()
    if config.launch.nodes > 1:
        host, _ = config.launch.meeting_point
        own = host if node_rank == 0 else ""
        node = Node(rank=node_rank, count=config.launch.nodes, address=host, own_address=own)
    return Assignment(
        run_dir=run_dir,
        attempt_dir=run_dir.logs / "attempt_N",
        private=Path(tempfile.gettempdir()) / "grpo-async-run-RANDOM",
        resume_step=resume_step,
        node=node,
    )


def free_ports(config: ExperimentConfig) -> tuple[int, ...]:
    """One for each server that the run starts; nothing holds them."""
    if config.inference.urls:
        return ()
    return machine_module.free_ports(config.inference.host, config.inference.replicas)


def plan_processes(
    config: ExperimentConfig,
    *,
    engine: EngineChoice,
    assignment: Assignment,
    ports: Sequence[int] = (),
    machine: Machine,
    token: str | None,
    memory: MemoryPlan | None = None,
    notes: Sequence[str] = (),
) -> ProcessPlan:
    """Plan the processes of this machine: servers and torchrun; torchrun alone on a machine that follows node 0.

    Args:
        engine: SERVERS_ELSEWHERE on a machine that follows.
        assignment: of node 0, without `server_urls` and `transport`, which are planned here; of a machine that follows, whole.
        ports: of the servers, which keep them over restarts.
        token: guards the servers; None only with servers that ask for none.
        memory: of the processes, see launcher.memory.
        notes: shown with the plan, after its own.

    Raises:
        ConfigError: `weights.transport` or `inference.vllm.sleep_while_training` is impossible here.
    """
    node, memory = assignment.node, memory or MemoryPlan()
    facts = list(_nodes_facts(config, node))
    if (
        node.rank == 0
        and config.inference.vllm.sleep_while_training
        and not (engine.engine == "vllm" and engine.on_gpu)
    ):
        raise ConfigError(
            f"inference.vllm.sleep_while_training: only a vLLM that this run starts on a GPU can sleep, and the engine is "
            f"{engine.engine}{'' if engine.on_gpu else ' without a GPU'}; leave the setting out"
        )
    shares = share_gpus(config, engine, machine.gpus)
    if node.rank == 0:
        transport, reason = plan_transport(config, engine, shares)
        urls = tuple(config.inference.urls) or tuple(
            _url(config.inference.scheme, config.inference.host, port) for port in ports
        )
        assignment = assignment.model_copy(update={"server_urls": urls, "transport": transport})
        facts += _facts(config, f"{transport}: {reason}")
    environment = _common_environment(machine, token, node)
    if sys.platform == "linux" and engine.engine != "external" and node.is_alone:
        environment["NCCL_SOCKET_IFNAME"] = "lo"  # everything is here: NCCL must not meet on another address
    servers = tuple(
        _server(config, engine, assignment, machine, environment, port, memory=memory, index=index, gpus=gpus)
        for index, (port, gpus) in enumerate(zip(ports, shares.servers, strict=False))
    )
    trainer = _trainer(config, assignment, machine, environment, shares.trainer, memory=memory.trainer)
    return ProcessPlan(
        run_name=config.run.name,
        engine=engine,
        assignment=assignment,
        servers=servers,
        trainer=trainer,
        num_gpus=len(machine.gpus),
        facts=tuple(facts),
        notes=(*shares.notes, *memory.notes, *_own_notes(config, machine, [*servers, trainer], shares.shared), *notes),
    )


def _common_environment(machine: Machine, token: str | None, node: Node) -> dict[str, str]:
    """What every process of a run gets."""
    return {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(machine.working_dir), machine.python_path])),
        **({TOKEN_VARIABLE: token} if token else {}),
        **socket_names(node.own_address),
    }


def _environment(common: Mapping[str, str], threads: int, gpus: tuple[str, ...] | None) -> dict[str, str]:
    """Of one process: CPU threads, for every library that has a say, and the GPUs that it may see (None: as they are)."""
    libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return {**common, **dict.fromkeys(libraries, str(threads)), **visible}


def _server(
    config: ExperimentConfig,
    engine: EngineChoice,
    assignment: Assignment,
    machine: Machine,
    common: Mapping[str, str],
    port: int,
    *,
    memory: MemoryPlan,
    index: int,
    gpus: tuple[str, ...] | None,
) -> ProcessSpec:
    command = "serve-vllm" if engine.engine == "vllm" else "serve-embedded"
    # config.yaml stays what the user wrote, so that it can be resumed where the GPUs are shared in another way, or not
    cache = () if memory.cache_mb is None else ("--set", f"inference.vllm.kv_cache_mb={memory.cache_mb}")
    is_alone = config.inference.replicas == 1
    return ProcessSpec(
        name="inference server" if is_alone else f"inference server {index}",
        command=(
            *(machine.python, "-m", "grpo_async", command, str(attempt_config(assignment.attempt_dir))),
            *("--port", str(port)),
            *cache,
        ),
        environment={
            **_environment(common, config.inference.threads, gpus),
            # unix sockets between vLLM's processes: by default in a folder that everybody can list
            **({"VLLM_RPC_BASE_PATH": str(assignment.private)} if engine.engine == "vllm" else {}),
        },
        log_name="server.log" if is_alone else f"server_{index}.log",
        num_processes=1,
        threads=config.inference.threads,
        gpus=gpus or (),
        memory=memory.server,
    )


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
    alone: dict[str, str] = {}
    if node.is_alone:
        rendezvous = (
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(assignment.private / "rendezvous")),
            *("--rdzv-conf", "store_type=file"),
        )
        # torchrun would otherwise listen on every interface, for a store that the ranks do not use
        alone = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        if sys.platform == "linux":
            alone["GLOO_SOCKET_IFNAME"] = "lo"
    else:
        settings = f"rank={node.rank},timeout={max(1, round(launch.rdzv_timeout_s))}"
        rendezvous = (
            *("--rdzv-backend", RENDEZVOUS_BACKEND),
            *("--rdzv-endpoint", f"{host_in_url(node.address)}:{node.store_port}", "--rdzv-conf", settings),
        )
    return ProcessSpec(
        name="trainer",
        command=(
            *(machine.python, "-m", "grpo_async.launcher.torchrun"),
            *("--nnodes", str(node.count), "--nproc-per-node", str(launch.num_trainer_ranks), "--max-restarts", "0"),
            *rendezvous,
            # without an address the host's name is looked up
            *("--rdzv-id", config.run.name, "--local-addr", node.own_address or "127.0.0.1"),
            # of its own; without a place it makes a folder in the temporary directory, and leaves it there
            *("--log-dir", str(assignment.private / "torchrun")),
            *("-m", "grpo_async.trainer.main"),
        ),
        environment={
            **_environment(common, launch.trainer_threads, gpus),
            **alone,
            # a generator of rows that walks a set then gives the same rows to a resumed run
            "PYTHONHASHSEED": "0",
            ASSIGNMENT_VARIABLE: assignment.model_dump_json(),
        },
        log_name="trainer.log" if node.rank == 0 else f"trainer_node{node.rank}.log",
        num_processes=launch.num_trainer_ranks,
        threads=launch.trainer_threads,
        gpus=gpus or (),
        memory=memory,
    )


def _nodes_facts(config: ExperimentConfig, node: Node) -> Iterator[tuple[str, str]]:
    """Which machine does what; nothing where there is one."""
    if node.is_alone:
        return
    ranks = config.launch.num_trainer_ranks
    meets = f", {node.address}" if node.address else ""
    yield (
        "nodes",
        f"{node.count}, which meet at {config.launch.rdzv} (launch.rdzv{meets}); sharding: {config.launch.sharding}",
    )
    for rank in range(node.count):
        first, last = rank * ranks, (rank + 1) * ranks - 1
        own = f"trainer rank {first}" if ranks == 1 else f"trainer ranks {first} to {last}"
        leads = "leads: run directory, spawned servers, progress; " if rank == 0 else ""
        here = " (this machine)" if rank == node.rank else f": grpo-async train CONFIG --node-rank {rank}"
        yield f"node {rank}", f"{leads}{own}{here}"
    if names := socket_names(node.own_address):
        yield (
            "interface",
            f"{', '.join(sorted(set(names.values())))} ({node.own_address}), for {' and '.join(sorted(names))}",
        )


def _facts(config: ExperimentConfig, weights: str) -> Iterator[tuple[str, str]]:
    yield "precision", config.precision
    yield "weights", f"{weights}; requests in flight: {config.weights.mode} (weights.mode)"
    tls = config.inference.tls
    if tls is not None:
        own = f"certificate {tls.certificate}, " if tls.certificate is not None else ""
        yield "TLS", f"{own}trusted: {tls.trusted or 'the certificates of the system'}"


def _own_notes(
    config: ExperimentConfig, machine: Machine, specs: Sequence[ProcessSpec], shared_gpus: Sequence[str]
) -> Iterator[str]:
    threads = sum(spec.num_processes * spec.threads for spec in specs)
    if threads > machine.num_cpus:
        yield (
            f"{threads} compute threads on {machine.num_cpus} CPUs slow each other down; "
            "see launch.trainer_threads, launch.num_trainer_ranks, inference.threads"
        )
    if config.inference.vllm.sleep_while_training and not shared_gpus:
        yield "inference.vllm.sleep_while_training: the servers share no GPU with the trainer, so sleeping gains nothing"


def _url(scheme: str, host: str, port: int) -> str:
    host = _WILDCARDS.get(host, host)
    return f"{scheme}://{host_in_url(host)}:{port}"
