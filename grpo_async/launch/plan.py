"""The processes of a run, as data: commands, environment, ports, threads, devices. A pure function of its arguments.

    plan = plan_processes(config, engine=..., places=..., machine=...)
    print(plan.describe())

Secrets travel by environment only, and `describe` shows neither the token nor anything else of the environment.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grpo_async.config import ExperimentConfig
from grpo_async.inference.surface import TOKEN_VARIABLE
from grpo_async.launch.control import CONTROL_VARIABLE
from grpo_async.launch.engine_choice import EngineChoice
from grpo_async.launch.torchrun_entry import ATTEMPT_VARIABLE
from grpo_async.rundir import RunDir

RUN_DIR_VARIABLE = "GRPO_ASYNC_RUN_DIR"
SERVER_URL_VARIABLE = "GRPO_ASYNC_SERVER_URL"
RESUME_VARIABLE = "GRPO_ASYNC_RESUME"
STORE_VARIABLE = "GRPO_ASYNC_STORE"

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # to connect to instead


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where a run reads and writes. `private` is a folder that only this user can enter; `port` is the server's."""

    run_dir: RunDir
    attempt: Path
    private: Path
    port: int

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
    """Everything that is started. `server` is None when `inference.url` names one that runs already."""

    run_name: str
    engine: EngineChoice
    server_url: str
    server: ProcessSpec | None
    trainer: ProcessSpec
    places: Places
    resume_step: int | None
    notes: tuple[str, ...] = field(default=())

    @property
    def processes(self) -> tuple[ProcessSpec, ...]:
        return (self.trainer,) if self.server is None else (self.server, self.trainer)

    def describe(self) -> str:
        """The plan for humans; also the content of plan.txt."""
        start = "from the beginning" if self.resume_step is None else f"from the checkpoint of step {self.resume_step}"
        lines = [
            f"run        {self.run_name}, {start}",
            f"directory  {self.places.run_dir.root}",
            f"engine     {self.engine.engine}: {self.engine.reason}",
            f"server     {self.server_url}" + (" (not started by this run)" if self.server is None else ""),
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
    resume_step: int | None = None,
    notes: Sequence[str] = (),
) -> ProcessPlan:
    """Plan the processes of one run. `token` guards the server; None only with a server that asks for none.
    `notes` are shown with the plan, after its own."""
    server_gpus, trainer_gpus, own_notes = _share_gpus(config, engine, machine)
    url = config.inference.url or _url(config.inference.host, places.port)
    common = {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(machine.working_dir), machine.python_path])),
        **({TOKEN_VARIABLE: token} if token else {}),
    }
    server = None
    if engine.engine != "external":
        command = "serve-vllm" if engine.engine == "vllm" else "serve-embedded"
        config_path = str(places.run_dir.config)
        server = ProcessSpec(
            name="inference server",
            command=(machine.python, "-m", "grpo_async", command, config_path, "--port", str(places.port)),
            environment={**common, **_threads(config.inference.threads), **_visible(server_gpus)},
            log_name="server.log",
            num_processes=1,
            threads=config.inference.threads,
            gpus=server_gpus or (),
        )
    trainer = ProcessSpec(
        name="trainer",
        command=_torchrun(config, places, machine),
        environment={
            **common,
            **_threads(config.launch.trainer_threads),
            **_visible(trainer_gpus),
            # torchrun would otherwise listen on every interface, for a store that the ranks do not use
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
            # a generator of rows that walks a set then gives the same rows to a resumed run
            "PYTHONHASHSEED": "0",
            RUN_DIR_VARIABLE: str(places.run_dir.root),
            ATTEMPT_VARIABLE: str(places.attempt),
            SERVER_URL_VARIABLE: url,
            CONTROL_VARIABLE: str(places.control_socket),
            STORE_VARIABLE: str(places.store),
            RESUME_VARIABLE: "" if resume_step is None else str(resume_step),
        },
        log_name="trainer.log",
        num_processes=config.launch.num_trainer_ranks,
        threads=config.launch.trainer_threads,
        gpus=trainer_gpus or (),
    )
    specs = [trainer] if server is None else [server, trainer]
    threads = sum(spec.num_processes * spec.threads for spec in specs)
    if threads > machine.num_cpus:
        own_notes.append(
            f"{threads} compute threads on {machine.num_cpus} CPUs slow each other down; "
            "see launch.trainer_threads, launch.num_trainer_ranks, inference.threads"
        )
    return ProcessPlan(
        run_name=config.run.name,
        engine=engine,
        server_url=url,
        server=server,
        trainer=trainer,
        places=places,
        resume_step=resume_step,
        notes=(*own_notes, *notes),
    )


def _torchrun(config: ExperimentConfig, places: Places, machine: Machine) -> tuple[str, ...]:
    return (
        *(machine.python, "-m", "grpo_async.launch.torchrun_entry"),
        *("--nnodes", "1", "--nproc-per-node", str(config.launch.num_trainer_ranks), "--max-restarts", "0"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", str(places.rendezvous), "--rdzv-conf", "store_type=file"),
        *("--rdzv-id", config.run.name, "--local-addr", "127.0.0.1"),  # without it the host's name is looked up
        *("-m", "grpo_async.launch.trainer"),
    )


def _share_gpus(
    config: ExperimentConfig, engine: EngineChoice, machine: Machine
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None, list[str]]:
    """GPUs of the server and of the trainer: disjoint where there are enough, else shared. None: variable not set.

    Worked example: 4 GPUs 0-3, 2 ranks, vLLM with tensor_parallel_size 2 -> server (2, 3), trainer (0, 1).
    """
    on_gpu = config.launch.device != "cpu"
    ranks = config.launch.num_trainer_ranks if on_gpu else 0
    if engine.engine == "vllm":
        wanted = config.inference.vllm.tensor_parallel_size
    else:
        wanted = int(engine.engine == "embedded" and config.inference.embedded.device == "cuda")
    if not machine.gpus:
        return None, None, []
    hidden: tuple[str, ...] = ()
    if ranks + wanted <= len(machine.gpus):
        return machine.gpus[ranks : ranks + wanted], machine.gpus[:ranks] if on_gpu else hidden, []
    notes = []
    if ranks and wanted:
        notes.append(
            f"{len(machine.gpus)} GPU for {ranks} trainer rank(s) and {wanted} of the server: they share; "
            "leave the trainer memory with inference.vllm.gpu_memory_utilization"
        )
    return machine.gpus if wanted else hidden, machine.gpus if on_gpu else hidden, notes


def _visible(gpus: tuple[str, ...] | None) -> dict[str, str]:
    return {} if gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}


def _threads(count: int) -> dict[str, str]:
    return dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), str(count))


def _url(host: str, port: int) -> str:
    host = _WILDCARDS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
