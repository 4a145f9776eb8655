"""Which process gets which GPU, and what follows from it: dtypes, the transport of the weights, the split of a shared GPU's memory.

Pure but for `split_memory`, which reads the headers of the model's files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_async.checks.memory import estimate_trainer, format_bytes, shared_gpu_fraction
from grpo_async.checks.model_files import count_parameters
from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.inference.api import TransportKind
from grpo_async.servers.engine_choice import EngineChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuShares:
    """The GPUs of the trainer (one per rank) and of each server, as entries of CUDA_VISIBLE_DEVICES. None: the variable is
    left alone, because there are no GPUs; an empty tuple hides them."""

    trainer: tuple[str, ...] | None
    servers: tuple[tuple[str, ...] | None, ...]
    notes: tuple[str, ...] = ()

    @property
    def shared(self) -> tuple[str, ...]:
        """GPUs on which the trainer and a server work, in the trainer's order."""
        taken = {gpu for gpus in self.servers for gpu in gpus or ()}
        return tuple(gpu for gpu in self.trainer or () if gpu in taken)

    @property
    def most_servers_on_a_gpu(self) -> int:
        """2 where two servers have a GPU in common, 0 where no server has a GPU."""
        taken = [gpu for gpus in self.servers for gpu in gpus or ()]
        return max((taken.count(gpu) for gpu in taken), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySplit:
    """Of a GPU that trainer and vLLM share. `server_fraction` is None where the configuration sets
    `inference.vllm.gpu_memory_utilization` itself; `text` is for the plan."""

    server_fraction: float | None
    text: str


def with_dtypes(config: ExperimentConfig, engine: EngineChoice, gpus: Sequence[str]) -> ExperimentConfig:
    """With the dtypes that `config` leaves open; those of servers that run already as where the trainer runs."""
    trains_on_gpu = config.launch.device == "cuda" or (config.launch.device == "auto" and bool(gpus))
    return config.with_dtypes(
        trains_on_gpu=trains_on_gpu, serves_on_gpu=trains_on_gpu if engine.engine == "external" else engine.on_gpu
    )


def share_gpus(config: ExperimentConfig, engine: EngineChoice, gpus: Sequence[str]) -> GpuShares:
    """GPUs of the trainer's ranks first, then of each server: disjoint where there are enough, else shared from the first on.

    Worked examples, 2 ranks: 4 GPUs 0-3, one vLLM with tensor_parallel_size 2 -> trainer (0, 1), server (2, 3).
    4 GPUs, 2 replicas -> trainer (0, 1), servers (2,) and (3,). 2 GPUs, 2 replicas -> trainer (0, 1), servers (0,) and (1,).
    """
    ranks = config.launch.num_trainer_ranks if config.launch.device != "cpu" else 0
    num_servers = 0 if engine.engine == "external" else config.inference.replicas
    each = _gpus_of_a_server(config, engine)
    if not gpus:
        return GpuShares(trainer=None, servers=(None,) * num_servers)
    wanted = num_servers * each
    first = ranks if ranks + wanted <= len(gpus) else 0
    servers = tuple(
        tuple(dict.fromkeys(gpus[(first + server * each + k) % len(gpus)] for k in range(each)))
        for server in range(num_servers)
    )
    shares = GpuShares(trainer=tuple(gpus[:ranks]), servers=servers)
    notes = []
    if shares.shared:
        notes.append(
            f"{len(gpus)} GPU for {ranks} trainer rank(s) and {wanted} of the servers: they share GPU {','.join(shares.shared)}"
        )
    for name, number in (("launch.num_trainer_ranks", ranks), ("inference.vllm.tensor_parallel_size", each)):
        if number > len(gpus):
            notes.append(f"{name}: {number} is more than the {len(gpus)} GPU of this machine: it will not start here")
    return GpuShares(trainer=shares.trainer, servers=servers, notes=tuple(notes))


def plan_transport(config: ExperimentConfig, engine: EngineChoice, shares: GpuShares) -> tuple[TransportKind, str]:
    """How the weights travel, and why.

    Raises:
        ConfigError: `weights.transport` names a way that is impossible with these devices.
    """
    from grpo_async.weights.choice import choose_transport

    wanted = config.weights.transport
    trainer = f"GPU {shares.trainer[0]}" if shares.trainer else "its GPU" if config.launch.device == "cuda" else "cpu"
    if engine.engine == "external":
        if wanted == "auto":
            return (
                "gloo",
                "it works with any server; for external ones on GPUs of this network, weights.transport: nccl",
            )
        # whoever asks for it knows what the servers have
        return choose_transport(wanted, trainer, ["cpu" if wanted == "gloo" else "the servers' GPUs"])
    workers = [f"GPU {gpu}" for gpus in shares.servers for gpu in gpus or ()]
    if not workers:
        workers = ["the servers' GPUs" if engine.on_gpu else "cpu"]
    return choose_transport(wanted, trainer, workers)


def split_memory(
    config: ExperimentConfig, engine: EngineChoice, gpus: Sequence[str], gpu_bytes: int | None
) -> MemorySplit | None:
    """Plan the memory of GPUs that the trainer shares with vLLM; None where they share none.

    Args:
        gpu_bytes: of the smallest GPU; None: unknown.

    Raises:
        ConfigError: it cannot be planned.
    """
    shares = share_gpus(config, engine, gpus)
    if engine.engine != "vllm" or not shares.shared:
        return None
    options = config.inference.vllm
    asleep = "; the server gives its memory back while a step trains" if options.sleep_while_training else ""
    number = count_parameters(config.model.path)
    if options.gpu_memory_utilization is not None:
        text = f"vLLM {options.gpu_memory_utilization:g}, as inference.vllm.gpu_memory_utilization says{asleep}"
        return MemorySplit(server_fraction=None, text=text)
    missing = "the size of the model (a hub name)" if number is None else "the memory of the GPU"
    if number is None or gpu_bytes is None:
        raise ConfigError(
            f"inference.vllm.gpu_memory_utilization: trainer and server share GPU {','.join(shares.shared)}, and {missing} is "
            "not known before the start, so the split cannot be planned; set the fraction of vLLM, such as 0.4"
        )
    servers = shares.most_servers_on_a_gpu
    fraction, advice = shared_gpu_fraction(config, number, gpu_bytes)
    fraction = math.floor(fraction * 100 / servers) / 100
    trainer = estimate_trainer(config, number)
    each = f"each of the {servers} servers on it" if servers > 1 else "vLLM"
    text = (
        f"{each} {fraction:g} of {format_bytes(gpu_bytes)}; the trainer needs about {format_bytes(trainer.total)}: "
        f"{trainer.describe()}{asleep}{'' if advice is None else f'; {advice}'}"
    )
    return MemorySplit(server_fraction=fraction, text=text)


def _gpus_of_a_server(config: ExperimentConfig, engine: EngineChoice) -> int:
    if not engine.on_gpu:
        return 0
    return config.inference.vllm.tensor_parallel_size if engine.engine == "vllm" else 1
