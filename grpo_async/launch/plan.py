"""The processes of a run, as data: commands, environment, ports, threads, devices.

    plan = plan_processes(config, engine=..., assignment=..., token=...)
    print(plan.describe())

One machine: the trainer's ranks meet through private files, and by default nothing listens beyond loopback. Several (launch.ray):
each has its part of the plan, ranks or a server.
Secrets travel by environment only, and `describe` shows neither the token nor anything else of the environment.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from grpo_async.checks.speed import describe_step
from grpo_async.config import ExperimentConfig
from grpo_async.config.loader import set_options
from grpo_async.errors import ConfigError
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.launch.gpus import (
    GpuShares,
    MemoryPlan,
    fill_in_for_devices,
    gpus_of_lead,
    plan_memory,
    plan_transport,
    share_gpus,
    trains_on_gpu,
)
from grpo_async.processes.assignment import ASSIGNMENT_VARIABLE, Assignment, Node
from grpo_async.processes.machine import Machine, inspect_machine, interface_of
from grpo_async.run_directory import RunDir, attempt_config
from grpo_async.servers.engine_choice import EngineChoice, choose_engine
from grpo_async.training.flash import TORCHS_OWN, installed
from grpo_async.utils.network import LOOPBACK, WILDCARDS, host_in_url
from grpo_async.utils.text import count


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

    def describe(self) -> str:
        return f"{self.name}: {count(self.num_processes, 'process')}, {count(self.threads, 'CPU thread')} each, {self.device}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessPlan:
    """Everything that one machine starts. `servers` is empty when others run them, `trainer` is None where it only serves."""

    run_name: str
    engine: EngineChoice
    assignment: Assignment
    servers: tuple[ProcessSpec, ...]
    trainer: ProcessSpec | None
    facts: Mapping[str, str]
    """Further lines of its description."""
    notes: tuple[str, ...]

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        return (*self.servers, *([] if self.trainer is None else [self.trainer]))

    def describe(self) -> str:
        assignment = self.assignment
        start = {
            "evaluation": "evaluation only",
            "train": "from the beginning"
            if assignment.resume_step is None
            else f"from the checkpoint of step {assignment.resume_step}",
        }[assignment.purpose]
        external = " (not started by this run)" if self.engine.engine == "external" else ""
        lines = [
            f"run        {self.run_name}, {start}",
            f"directory  {assignment.run_dir.root}",
            f"logs       {assignment.attempt_dir}",
            f"engine     {self.engine.engine}: {self.engine.reason}",
            *(f"server     {url}{external}" for url in assignment.server_urls if url and urlsplit(url).port != 0),
            *(f"{name:<10} {text}" for name, text in self.facts.items()),
        ]
        for specs in filter(None, (self.servers, [self.trainer] if self.trainer else [])):
            lines += ["", *(spec.describe() for spec in specs)]
            if specs[0].memory:
                lines.append(f"  memory of each process  {specs[0].memory}")
        if self.notes:
            lines += ["", *(f"note: {note}" for note in self.notes)]
        return "\n".join(lines) + "\n"


def own_urls(config: ExperimentConfig, host: str, ports: Sequence[int]) -> tuple[str, ...]:
    """URLs of servers at these ports of `host`, as the trainer reaches them; empty when others run the servers."""
    host = host_in_url(WILDCARDS.get(host, host))
    return () if config.inference.urls else tuple(f"http://{host}:{port}" for port in ports)


def plan_dry(
    config: ExperimentConfig,
    *,
    machine: Machine | None = None,
    resume_step: int | None = None,
    plans_memory: bool = False,
    notes: Sequence[str] = (),
) -> ProcessPlan:
    """Plan a run without starting it. Names are placeholders: nothing is made or looked up, and port 0 means one that is chosen
    at the start. With `launch.ray` it is the plan of the machine with rank 0, which is assumed to have the GPUs that it needs.

    Args:
        machine: another one, with what the configuration needs but for GPUs, for which a step is estimated; None: this one.
        plans_memory: estimate memory, for which the model's files are read.
    """
    is_elsewhere = machine is not None
    machine, launch, inference = machine or inspect_machine(), config.launch, config.inference
    machine = replace(machine, gpus=gpus_of_lead(config, machine.gpus))
    engine = choose_engine(config, is_here=launch.ray is None and not is_elsewhere)
    run_dir = RunDir(config.run_path.absolute())
    assignment = Assignment(
        run_dir=run_dir,
        attempt_dir=run_dir.attempt("N"),
        private_dir=Path(tempfile.gettempdir()) / "grpo-run-RANDOM",
        resume_step=resume_step,
    )
    if launch.ray is None:
        changes: dict[str, Any] = {"server_urls": own_urls(config, inference.host, (0,) * inference.max_replicas)}
    else:
        changes = {"node": Node(count=launch.trainer_nodes, address="NODE_0", own_address="NODE_0")}
        trained = f"{count(launch.trainer_nodes, 'machine')} with {count(launch.num_trainer_ranks, 'rank')} each"
        served = f"{inference.min_replicas} to {inference.max_replicas} servers, each on a node that has room for it"
        notes = (f"launch.ray: {trained}; {'running servers' if inference.urls else served}", *notes)
    config = fill_in_for_devices(config, engine, machine.gpus)
    plan = plan_processes(
        config,
        engine=engine,
        assignment=assignment.model_copy(update=changes),
        machine=machine,
        token=None,
        servers=None if launch.ray is None else range(0),
        plans_memory=plans_memory,
        notes=notes,
    )
    if not is_elsewhere:
        return plan
    facts = dict(plan.facts)
    if "attention" in facts:
        facts["attention"] = "varlen; the newest flash attention that is installed there"
    if engine.engine == "vllm":
        facts |= describe_step(config, len(machine.gpus))
    return replace(plan, facts=facts)


def plan_processes(
    config: ExperimentConfig,
    *,
    engine: EngineChoice,
    assignment: Assignment,
    token: str | None,
    machine: Machine | None = None,
    trains: bool = True,
    servers: range | None = None,
    plans_memory: bool = True,
    notes: Sequence[str] = (),
) -> ProcessPlan:
    """Plan the processes of this machine: its servers, and torchrun with its ranks.

    Args:
        assignment: where rank 0 is without `transport`, which is planned here; elsewhere whole. `server_urls` are those of all
            servers of the run, by their index.
        token: guards the servers; None only with servers that ask for none.
        servers: the indices of those that run here; None: all that the run starts.
    """
    node, machine = assignment.node, machine or inspect_machine()
    if servers is None:
        servers = range(0 if engine.engine == "external" else config.inference.max_replicas)
    shares = share_gpus(config, engine, machine.gpus, trains=trains, num_servers=len(servers))
    memory = plan_memory(config, engine, shares, machine.gpu_bytes) if plans_memory else MemoryPlan()
    facts = {}
    if node.rank == 0 and trains:
        if config.inference.vllm.sleep_while_training and not (engine.engine == "vllm" and engine.on_gpu):
            raise ConfigError(
                f"inference.vllm.sleep_while_training: only a vLLM that this run starts on a GPU can sleep, and the engine is "
                f"{engine.engine}{'' if engine.on_gpu else ' without a GPU'}; leave the setting out"
            )
        transport, reason = plan_transport(config, engine, shares)
        urls = assignment.server_urls or tuple(config.inference.urls)
        assignment = assignment.model_copy(update={"server_urls": urls, "transport": transport})
        in_flight = f"{config.weights.mode} (weights.mode)"
        if slots := config.adapter_slots:
            in_flight = f"keep their adapter (model.lora.push: adapter_swap, {slots} at a time)"
        weights = f"{transport}: {reason}; requests in flight: {in_flight}"
        facts = {"precision": config.precision, "weights": weights}
        if trains_on_gpu(config, machine.gpus) and config.model.may_use_varlen:
            found = installed()
            facts["attention"] = (
                f"varlen; {found[0]}, if it passes its trial here" if found else f"varlen; {TORCHS_OWN}"
            )
    environment = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [os.getcwd(), os.environ.get("PYTHONPATH")])),
        **({TOKEN_VARIABLE: token} if token else {}),
    }
    if (interface := interface_of(node.own_address)) is not None:  # gloo and NCCL listen there only
        names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
        environment |= {name: interface for name in names if not os.environ.get(name)}
    if sys.platform == "linux" and engine.engine != "external" and node.is_alone and trains:
        environment["NCCL_SOCKET_IFNAME"] = "lo"  # everything is here: NCCL must not meet on another address
    specs = _servers(config, engine, assignment, environment, memory, shares, servers)
    trainer = None
    if trains:
        assignment = assignment.model_copy(update={"on_gpu": trains_on_gpu(config, machine.gpus)})
        trainer = _trainer(config, assignment, environment, shares.trainer, memory=memory.trainer)
    started = specs if trainer is None else (*specs, trainer)
    return ProcessPlan(
        run_name=config.run.name,
        engine=engine,
        assignment=assignment,
        servers=specs,
        trainer=trainer,
        facts=facts,
        notes=(*shares.notes, *memory.notes, *_own_notes(config, machine, started, shares.shared), *notes),
    )


def _servers(
    config: ExperimentConfig,
    engine: EngineChoice,
    assignment: Assignment,
    common: Mapping[str, str],
    memory: MemoryPlan,
    shares: GpuShares,
    servers: range,
) -> tuple[ProcessSpec, ...]:
    if not servers:
        return ()
    node, urls = assignment.node, assignment.server_urls
    # config.yaml stays what the user wrote, so that it can be resumed where the GPUs are shared in another way, or not
    overrides = []
    if memory.cache_mb is not None:
        overrides.append(f"inference.vllm.kv_cache_mb={memory.cache_mb}")
    if not node.is_alone and config.inference.host not in WILDCARDS:
        overrides.append(f"inference.host={node.own_address}")
    command = "serve-vllm" if engine.engine == "vllm" else "serve-embedded"
    return tuple(
        ProcessSpec(
            name=server_name(index, len(urls)),
            command=(
                *(sys.executable, "-m", "grpo_async", command, str(attempt_config(assignment.attempt_dir))),
                *("--port", str(urlsplit(urls[index]).port or 0)),
                *set_options(overrides),
            ),
            environment={
                **_environment(common, config.inference.threads, own),
                # unix sockets between vLLM's processes: by default in a folder that everybody can list
                **({"VLLM_RPC_BASE_PATH": str(assignment.private_dir)} if engine.engine == "vllm" else {}),
            },
            log_name=server_log(index, len(urls)),
            num_processes=1,
            threads=config.inference.threads,
            gpus=own or (),
            memory=memory.server,
        )
        for index, own in zip(servers, shares.servers, strict=True)
    )


def server_name(index: int, number: int) -> str:
    return "inference server" if number == 1 else f"inference server {index}"


def server_log(index: int, number: int) -> str:
    return "server.log" if number == 1 else f"server_{index}.log"


def trainer_log(rank: int) -> str:
    return f"trainer_node{rank}.log" if rank else "trainer.log"


def _environment(common: Mapping[str, str], threads: int, gpus: tuple[str, ...] | None) -> dict[str, str]:
    """Environment of one process: thread counts of OpenMP, MKL and OpenBLAS, and the GPUs that it may see (None: as they are)."""
    libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    return {**common, **dict.fromkeys(libraries, str(threads)), **visible}


def _trainer(
    config: ExperimentConfig,
    assignment: Assignment,
    common: Mapping[str, str],
    gpus: tuple[str, ...] | None,
    *,
    memory: str,
) -> ProcessSpec:
    launch, node = config.launch, assignment.node
    environment = {
        **_environment(common, launch.trainer_threads, gpus),
        # a generator of rows that walks a set then gives the same rows to a resumed run
        "PYTHONHASHSEED": "0",
        ASSIGNMENT_VARIABLE: assignment.model_dump_json(),
    }
    if gpus and assignment.transport != "ipc" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # micro-batches of many lengths otherwise leave holes that no tensor fits in; ipc cannot share such memory
        environment["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    options = {
        "--nnodes": node.count,
        "--nproc-per-node": launch.num_trainer_ranks,
        "--max-restarts": 0,
        "--rdzv-id": config.run.name,
        # without an address the host's name is looked up
        "--local-addr": node.own_address or LOOPBACK,
        # without a folder it makes one in the temporary directory, and leaves it there
        "--log-dir": assignment.private_dir / "torchrun",
    }
    if node.count == 1:
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
            "--rdzv-backend": "static",  # which leaves every agent its rank
            "--node-rank": node.rank,
            "--master-addr": node.address,
            "--master-port": node.port,
            "--rdzv-conf": f"timeout={max(1, round(launch.placement_timeout_s))}",
        }
    return ProcessSpec(
        name="trainer",
        command=(
            *(sys.executable, "-m", "grpo_async.launch.torchrun"),
            *(str(word) for option in options.items() for word in option),
            *("-m", "grpo_async.trainer.main"),
        ),
        environment=environment,
        log_name=trainer_log(node.rank),
        num_processes=launch.num_trainer_ranks,
        threads=launch.trainer_threads,
        gpus=gpus or (),
        memory=memory,
    )


def _own_notes(
    config: ExperimentConfig, machine: Machine, specs: Sequence[ProcessSpec], shared_gpus: Sequence[str]
) -> Iterator[str]:
    threads = sum(spec.num_processes * spec.threads for spec in specs)
    if threads > machine.num_cpus:
        yield (
            f"{threads} compute threads on {count(machine.num_cpus, 'CPU')} slow each other down; "
            "see launch.trainer_threads, launch.num_trainer_ranks, inference.threads"
        )
    launch = config.launch
    of_a_rank = machine.num_cpus // launch.num_trainer_ranks
    if config.training.cpu_offload and launch.trainer_threads < of_a_rank:
        yield (
            f"training.cpu_offload: each rank updates its weights on {count(launch.trainer_threads, 'CPU thread')}; "
            f"set launch.trainer_threads: {of_a_rank}, as this machine has {count(machine.num_cpus, 'CPU')}"
        )
    if config.inference.vllm.sleep_while_training and not shared_gpus:
        yield "inference.vllm.sleep_while_training: the servers share no GPU with the trainer, so sleeping has no benefit"
    if (warmup := config.optimizer.warmup_steps) > config.warmup_steps:
        yield f"optimizer.warmup_steps: {warmup} is cut to {config.warmup_steps}: the run has no more steps"
