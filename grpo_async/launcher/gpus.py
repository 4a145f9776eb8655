"""Which process gets which GPU, and what follows from it: dtypes, the transport of the weights. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_async.config import ExperimentConfig
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
    if config.model.lora is not None and config.model.lora.push == "adapter":
        return "gloo", "adapters alone travel (model.lora.push), and each server adds them to the weights of its files"
    trainer = f"GPU {shares.trainer[0]}" if shares.trainer else "its GPU" if config.launch.device == "cuda" else "cpu"
    if engine.engine == "external":
        if wanted == "auto" and trainer != "cpu":
            return "nccl", "servers are taken to have GPUs of their own; for servers on CPUs, weights.transport: gloo"
        # whoever asks for it knows what the servers have
        return choose_transport(wanted, trainer, ["cpu" if wanted in ("auto", "gloo") else "the servers' GPUs"])
    workers = [f"GPU {gpu}" for gpus in shares.servers for gpu in gpus or ()]
    if not workers:
        workers = ["the servers' GPUs" if engine.on_gpu else "cpu"]
    return choose_transport(wanted, trainer, workers)


def _gpus_of_a_server(config: ExperimentConfig, engine: EngineChoice) -> int:
    if not engine.on_gpu:
        return 0
    return config.inference.vllm.tensor_parallel_size if engine.engine == "vllm" else 1
