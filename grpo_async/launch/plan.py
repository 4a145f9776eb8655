"""The processes of a run, as data: commands, environment, ports, threads, devices. A pure function of its arguments.

    plan = plan_processes(config, engine=..., places=..., machine=...)
    print(plan.describe())

Secrets travel by environment only, and `describe` shows neither the token nor anything else of the environment.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.inference.surface import TOKEN_VARIABLE, TransportKind
from grpo_async.launch.control import CONTROL_VARIABLE
from grpo_async.launch.engine_choice import EngineChoice
from grpo_async.launch.layout import MemorySplit, plan_transport, share_gpus
from grpo_async.launch.torchrun_entry import ATTEMPT_VARIABLE
from grpo_async.rundir import RunDir

RUN_DIR_VARIABLE = "GRPO_ASYNC_RUN_DIR"
SERVER_URLS_VARIABLE = "GRPO_ASYNC_SERVER_URLS"
"""A JSON list."""
TRANSPORT_VARIABLE = "GRPO_ASYNC_TRANSPORT"
RESUME_VARIABLE = "GRPO_ASYNC_RESUME"
STORE_VARIABLE = "GRPO_ASYNC_STORE"
PREFLIGHT_VARIABLE = "GRPO_ASYNC_PREFLIGHT_ONLY"
"""Set to 1 for a trainer that makes its checks and ends: exit code 0 when none failed, else 1."""

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # to connect to instead


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
    def rendezvous(self) -> Path:
        return self.private / "rendezvous"

    @property
    def store(self) -> Path:
        return self.private / "store"


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the plan takes from the machine. `gpus` are the entries of CUDA_VISIBLE_DEVICES that may be given away."""

    num_cpus: int = 1
    gpus: tuple[str, ...] = ()
    gpu_bytes: int | None = None
    """Memory of the smallest GPU; None: no GPU, or not known."""
    python: str = sys.executable
    working_dir: Path = Path()
    python_path: str = ""
    """The caller's PYTHONPATH."""


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
    preflight_only: bool = False
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
        external = "" if self.servers else " (not started by this run)"
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
) -> ProcessPlan:
    """Plan the processes of one run.

    Args:
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
    common = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(machine.working_dir), machine.python_path])),
        **({TOKEN_VARIABLE: token} if token else {}),
        # where everything is on one machine, NCCL must not meet on another address of it
        **({"NCCL_SOCKET_IFNAME": "lo"} if sys.platform == "linux" and engine.engine != "external" else {}),
    }
    servers = (
        ()
        if engine.engine == "external"
        else tuple(
            _server(config, engine, places, machine, common, memory=memory, index=index, gpus=gpus)
            for index, gpus in enumerate(shares.servers)
        )
    )
    trainer = ProcessSpec(
        name="trainer",
        command=_torchrun(config, places, machine),
        environment={
            **common,
            **_threads(config.launch.trainer_threads),
            **_visible(shares.trainer),
            # torchrun would otherwise listen on every interface, for a store that the ranks do not use
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
            # a generator of rows that walks a set then gives the same rows to a resumed run
            "PYTHONHASHSEED": "0",
            RUN_DIR_VARIABLE: str(places.run_dir.root),
            ATTEMPT_VARIABLE: str(places.attempt),
            SERVER_URLS_VARIABLE: json.dumps(urls),
            TRANSPORT_VARIABLE: transport,
            CONTROL_VARIABLE: str(places.control_socket),
            STORE_VARIABLE: str(places.store),
            RESUME_VARIABLE: "" if resume_step is None else str(resume_step),
            **({PREFLIGHT_VARIABLE: "1"} if preflight_only else {}),
        },
        log_name="trainer.log",
        num_processes=config.launch.num_trainer_ranks,
        threads=config.launch.trainer_threads,
        gpus=shares.trainer or (),
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
        facts=tuple(_facts(config, transport, reason, memory)),
        notes=(*shares.notes, *_own_notes(config, machine, [*servers, trainer], memory), *notes),
    )


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
            *(machine.python, "-m", "grpo_async", command, str(places.run_dir.config)),
            *("--port", str(places.ports[index])),
            *split,
        ),
        environment={
            **common,
            **_threads(config.inference.threads),
            **_visible(gpus),
            # unix sockets between vLLM's processes: by default in a folder that everybody can list
            **({"VLLM_RPC_BASE_PATH": str(places.private)} if engine.engine == "vllm" else {}),
        },
        log_name="server.log" if is_alone else f"server_{index}.log",
        num_processes=1,
        threads=config.inference.threads,
        gpus=gpus or (),
    )


def _torchrun(config: ExperimentConfig, places: Places, machine: Machine) -> tuple[str, ...]:
    return (
        *(machine.python, "-m", "grpo_async.launch.torchrun_entry"),
        *("--nnodes", "1", "--nproc-per-node", str(config.launch.num_trainer_ranks), "--max-restarts", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(places.rendezvous), "--rdzv-conf", "store_type=file"),
        *("--rdzv-id", config.run.name, "--local-addr", "127.0.0.1"),  # without it the host's name is looked up
        *("-m", "grpo_async.launch.trainer"),
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


def _visible(gpus: tuple[str, ...] | None) -> dict[str, str]:
    return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def _threads(count: int) -> dict[str, str]:
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(count))


def _url(scheme: str, host: str, port: int) -> str:
    host = _WILDCARDS.get(host, host)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
