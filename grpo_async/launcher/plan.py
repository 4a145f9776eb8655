"""The processes of a run, as data: commands, environment, ports, threads, devices. A pure function of its arguments.

    plan = plan_processes(config, engine=..., places=..., machine=...)
    print(plan.describe())

Secrets travel by environment only, and `describe` shows neither the token nor anything else of the environment.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.inference.surface import TOKEN_VARIABLE, TransportKind
from grpo_async.launcher.layout import MemorySplit, plan_transport, share_gpus
from grpo_async.launcher.trainer_plan import (
    Places,
    ProcessSpec,
    threads_environment,
    trainer_spec,
    visible_gpus,
)
from grpo_async.processes.machine import Machine
from grpo_async.processes.node_place import NodePlace
from grpo_async.rundir import attempt_config
from grpo_async.servers.engine_choice import EngineChoice

_FOLLOWS = "node 0 looks after the servers"
_ALONE = NodePlace()
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # to connect to instead


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """Everything that is started. `servers` is empty when `inference.urls` names some that run already."""

    run_name: str
    engine: EngineChoice
    server_urls: tuple[str, ...]
    servers: tuple[ProcessSpec, ...]
    trainer: ProcessSpec
    places: Places
    resume_step: int | None
    transport: TransportKind = "gloo"
    preflight_only: bool = False
    num_gpus: int | None = None
    """That this machine has for the run; None: not known."""
    facts: tuple[tuple[str, str], ...] = ()
    """Further lines of the description: weights, TLS, memory; (name, text)."""
    notes: tuple[str, ...] = field(default=())

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        return (*self.servers, self.trainer)

    def describe(self) -> str:
        """The plan for humans; also the content of plan.txt."""
        start = "from the beginning" if self.resume_step is None else f"from the checkpoint of step {self.resume_step}"
        if self.preflight_only:
            start = "checks only"
        external = "" if self.servers or self.engine.reason == _FOLLOWS else " (not started by this run)"
        lines = [
            f"run        {self.run_name}, {start}",
            f"directory  {self.places.run_dir.root}",
            f"engine     {self.engine.engine}: {self.engine.reason}",
            *(f"server     {url}{external}" for url in self.server_urls),
            *(f"{name:<10} {text}" for name, text in self.facts),
        ]
        for spec in self.processes:
            where = f"GPU {','.join(spec.gpus)}" if spec.gpus else "CPU"
            lines += [
                "",
                f"{spec.name}: {_count(spec.num_processes, 'process', 'processes')}, "
                f"{_count(spec.threads, 'CPU thread', 'CPU threads')} each, {where}",
                f"  command  {shlex.join(spec.command)}",
                f"  log      {self.places.attempt / spec.log_name}",
            ]
        if self.notes:
            lines += ["", *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"


def plan_processes(
    config: ExperimentConfig,
    *,
    engine: EngineChoice,
    places: Places,
    machine: Machine,
    token: str | None,
    memory: MemorySplit | None = None,
    resume_step: int | None = None,
    preflight_only: bool = False,
    notes: Sequence[str] = (),
    node: NodePlace = _ALONE,
) -> ProcessPlan:
    """Plan the processes of one run; of several machines, those of node 0 (of the others: `plan_follower`).

    Args:
        node: this machine among those of the run.
        token: guards the servers; None only with servers that ask for none.
        memory: of a GPU that the trainer shares with vLLM, see layout.split_memory.
        notes: shown with the plan, after its own.

    Raises:
        ConfigError: `weights.transport` or `inference.vllm.sleep_while_training` is impossible here.
    """
    if config.inference.vllm.sleep_while_training and not (engine.engine == "vllm" and engine.on_gpu):
        raise ConfigError(
            f"inference.vllm.sleep_while_training: only a vLLM that this run starts on a GPU can sleep, and the engine is "
            f"{engine.engine}{'' if engine.on_gpu else ' without a GPU'}; leave the setting out"
        )
    shares = share_gpus(config, engine, machine.gpus)
    transport, reason = plan_transport(config, engine, shares)
    if engine.engine == "external":
        urls = tuple(config.inference.urls)
    else:
        urls = tuple(_url(config.inference.scheme, config.inference.host, port) for port in places.ports)
    # where everything is on one machine, NCCL must not meet on another address of it
    is_here = sys.platform == "linux" and engine.engine != "external" and node.is_alone
    common = {
        **common_environment(machine, token, node),
        **({"NCCL_SOCKET_IFNAME": "lo"} if is_here else {}),
    }
    servers = (
        ()
        if engine.engine == "external"
        else tuple(
            _server(config, engine, places, machine, common, memory=memory, index=index, gpus=gpus)
            for index, gpus in enumerate(shares.servers)
        )
    )
    trainer = trainer_spec(
        config,
        places,
        machine,
        common,
        node=node,
        gpus=shares.trainer,
        server_urls=urls,
        transport=transport,
        resume_step=resume_step,
        preflight_only=preflight_only,
    )
    return ProcessPlan(
        run_name=config.run.name,
        engine=engine,
        server_urls=urls,
        servers=servers,
        trainer=trainer,
        places=places,
        resume_step=resume_step,
        preflight_only=preflight_only,
        transport=transport,
        num_gpus=len(machine.gpus),
        facts=(*_nodes_facts(config, node), *_facts(config, transport, reason, memory)),
        notes=(*shares.notes, *_own_notes(config, machine, [*servers, trainer], memory), *notes),
    )


def plan_follower(
    config: ExperimentConfig,
    *,
    node: NodePlace,
    places: Places,
    machine: Machine,
    token: str | None = None,
    server_urls: Sequence[str] = (),
    transport: TransportKind = "gloo",
    resume_step: int | None = None,
) -> ProcessPlan:
    """Plan the processes of a machine that follows node 0: torchrun with its ranks, and nothing else.

    Args:
        server_urls: as node 0 says, like `transport` and `resume_step`.
    """
    engine = EngineChoice(engine="external", reason=_FOLLOWS)
    shares = share_gpus(config, engine, machine.gpus)
    trainer = trainer_spec(
        config,
        places,
        machine,
        common_environment(machine, token, node),
        node=node,
        gpus=shares.trainer,
        server_urls=server_urls,
        transport=transport,
        resume_step=resume_step,
    )
    return ProcessPlan(
        run_name=config.run.name,
        engine=engine,
        server_urls=tuple(server_urls),
        servers=(),
        trainer=trainer,
        places=places,
        resume_step=resume_step,
        transport=transport,
        num_gpus=len(machine.gpus),
        facts=tuple(_nodes_facts(config, node)),
        notes=(*shares.notes, *_own_notes(config, machine, [trainer], None)),
    )


def common_environment(machine: Machine, token: str | None, node: NodePlace) -> dict[str, str]:
    """What every process of a run gets."""
    return {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(machine.working_dir), machine.python_path])),
        **({TOKEN_VARIABLE: token} if token else {}),
        **(node.socket_names or {}),
    }


def _server(
    config: ExperimentConfig,
    engine: EngineChoice,
    places: Places,
    machine: Machine,
    common: Mapping[str, str],
    *,
    memory: MemorySplit | None,
    index: int,
    gpus: tuple[str, ...] | None,
) -> ProcessSpec:
    command = "serve-vllm" if engine.engine == "vllm" else "serve-embedded"
    # config.yaml stays what the user wrote, so that it can be resumed where the GPUs are shared in another way, or not
    fraction = memory.server_fraction if memory is not None else None
    split = () if fraction is None else ("--set", f"inference.vllm.gpu_memory_utilization={fraction:g}")
    is_alone = config.inference.replicas == 1
    return ProcessSpec(
        name="inference server" if is_alone else f"inference server {index}",
        command=(
            *(machine.python, "-m", "grpo_async", command, str(attempt_config(places.attempt))),
            *("--port", str(places.ports[index])),
            *split,
        ),
        environment={
            **common,
            **threads_environment(config.inference.threads),
            **visible_gpus(gpus),
            # unix sockets between vLLM's processes: by default in a folder that everybody can list
            **({"VLLM_RPC_BASE_PATH": str(places.private)} if engine.engine == "vllm" else {}),
        },
        log_name="server.log" if is_alone else f"server_{index}.log",
        num_processes=1,
        threads=config.inference.threads,
        gpus=gpus or (),
    )


def _nodes_facts(config: ExperimentConfig, node: NodePlace) -> Iterator[tuple[str, str]]:
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
    names = node.socket_names or {}
    if names:
        yield (
            "interface",
            f"{', '.join(sorted(set(names.values())))} ({node.own_address}), for {' and '.join(sorted(names))}",
        )


def _facts(
    config: ExperimentConfig, transport: TransportKind, reason: str, memory: MemorySplit | None
) -> Iterator[tuple[str, str]]:
    yield "weights", f"{transport}: {reason}; requests in flight: {config.weights.mode} (weights.mode)"
    tls = config.inference.tls
    if tls is not None:
        own = f"certificate {tls.certificate}, " if tls.certificate is not None else ""
        yield "TLS", f"{own}trusted: {tls.trusted or 'the certificates of the system'}"
    if memory is not None:
        yield "GPU memory", memory.text


def _own_notes(
    config: ExperimentConfig, machine: Machine, specs: Sequence[ProcessSpec], memory: MemorySplit | None
) -> Iterator[str]:
    threads = sum(spec.num_processes * spec.threads for spec in specs)
    if threads > machine.num_cpus:
        yield (
            f"{threads} compute threads on {machine.num_cpus} CPUs slow each other down; "
            "see launch.trainer_threads, launch.num_trainer_ranks, inference.threads"
        )
    if config.inference.vllm.sleep_while_training and memory is None:
        yield "inference.vllm.sleep_while_training: the servers share no GPU with the trainer, so sleeping gains nothing"


def _url(scheme: str, host: str, port: int) -> str:
    host = _WILDCARDS.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
