"""Which process gets which GPU, and what follows from it: dtypes, the transport of the weights. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from grpo_async.config import ExperimentConfig
from grpo_async.config.base import TransportKind
from grpo_async.errors import ConfigError
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.utils.text import count


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
        """How many servers share a GPU at most: 2 where two have one in common, 0 where no server has a GPU."""
        taken = [gpu for gpus in self.servers for gpu in gpus or ()]
        return max((taken.count(gpu) for gpu in taken), default=0)


def fill_dtypes(config: ExperimentConfig, engine: EngineChoice, gpus: Sequence[str]) -> ExperimentConfig:
    """Fill in the dtypes that `config` leaves open; servers that run already get that of the device of the trainer."""
    on_gpu = trains_on_gpu(config, gpus)
    return config.with_dtypes(
        trains_on_gpu=on_gpu, serves_on_gpu=on_gpu if engine.engine == "external" else engine.on_gpu
    )


def gpus_of_lead(config: ExperimentConfig, gpus: tuple[str, ...]) -> tuple[str, ...]:
    """Return the GPUs of the machine with rank 0: those of this one, `gpus`. On a Ray cluster it may be another machine, which
    is assumed to have what it needs."""
    if gpus or config.launch.ray is None or config.launch.device == "cpu":
        return gpus
    return tuple(map(str, range(config.launch.num_trainer_ranks)))


def trains_on_gpu(config: ExperimentConfig, gpus: Sequence[str]) -> bool:
    """`launch.device: auto` takes GPUs where the machine has any."""
    return config.launch.device == "cuda" or (config.launch.device == "auto" and bool(gpus))


def share_gpus(
    config: ExperimentConfig,
    engine: EngineChoice,
    gpus: Sequence[str],
    *,
    trains: bool = True,
    num_servers: int | None = None,
) -> GpuShares:
    """GPUs of one machine for the trainer's ranks first, if it `trains`, then for each server (None: of all that the run
    starts). With `launch.colocate` the servers begin at the first GPU, too, and share it with the trainer.

    Worked examples, 2 ranks: 4 GPUs 0-3, one vLLM with tensor_parallel_size 2 -> trainer (0, 1), server (2, 3).
    4 GPUs, 2 replicas -> trainer (0, 1), servers (2,) and (3,). 2 GPUs, 2 replicas, colocate -> trainer (0, 1), servers (0,), (1,).
    """
    launch = config.launch
    if num_servers is None:
        num_servers = 0 if engine.engine == "external" else config.inference.max_replicas
    ranks = launch.num_trainer_ranks if launch.device != "cpu" and trains else 0
    each = gpus_of_a_server(config, engine)
    if not gpus:
        return GpuShares(trainer=None, servers=(None,) * num_servers)
    wanted = num_servers * each
    is_shared = launch.colocate and ranks > 0
    needed = max(ranks, min(each, wanted)) if is_shared else ranks + wanted
    if needed > len(gpus):
        needs = [f"{ranks} for the trainer's ranks (launch.num_trainer_ranks)"] if ranks else []
        if num_servers:
            servers_of = f"{count(num_servers, 'server')} of {each} (inference.replicas, sizes under inference.vllm)"
            needs.append(f"{wanted} for {servers_of}")
        raise ConfigError(
            f"launch: this machine has {count(len(gpus), 'GPU')} for the run, and it needs {' and '.join(needs)}; lower them, give "
            "servers other machines (launch.ray), or let both share GPUs on purpose (launch.colocate: true)"
        )
    first = 0 if is_shared else ranks
    servers = tuple(
        tuple(dict.fromkeys(gpus[(first + server * each + k) % len(gpus)] for k in range(each)))
        for server in range(num_servers)
    )
    shares = GpuShares(trainer=tuple(gpus[:ranks]), servers=servers)
    notes = []
    if shares.shared:
        notes.append(f"trainer and servers share GPU {','.join(shares.shared)}, as launch.colocate says")
    if idle := [gpu for gpu in gpus if gpu not in {*gpus[:ranks], *chain(*servers)}]:
        notes.append(f"GPU {','.join(idle)} of this machine: not used by this run")
    return replace(shares, notes=tuple(notes))


def plan_transport(config: ExperimentConfig, engine: EngineChoice, shares: GpuShares) -> tuple[TransportKind, str]:
    """How the weights travel, and why. `shares` are of the machine with rank 0, which sends them."""
    wanted = config.weights.transport
    if config.model.lora is not None and config.model.lora.push == "adapter":
        return (
            "gloo",
            "only the adapters are sent (model.lora.push), and each server adds them to the weights of its files",
        )
    trainer = f"GPU {shares.trainer[0]}" if shares.trainer else "its GPU" if config.launch.device == "cuda" else "cpu"
    workers = [f"GPU {gpu}" for gpus in shares.servers for gpu in gpus or ()]
    if engine.engine == "external":
        if wanted == "auto" and trainer != "cpu":
            return "nccl", "servers are assumed to have their own GPUs; for servers on CPUs, weights.transport: gloo"
        # a user who sets it knows the devices of the servers
        workers = ["cpu" if wanted in ("auto", "gloo") else "the servers' GPUs"]
    elif engine.on_gpu:
        elsewhere = config.num_servers - len(shares.servers)
        workers += [f"GPU {k} on another machine" for k in range(elsewhere * gpus_of_a_server(config, engine))]
    workers = workers or ["the servers' GPUs" if engine.on_gpu else "cpu"]
    fitting, why = _fitting_transport(trainer, workers)
    if wanted in ("auto", fitting):
        return fitting, why
    if wanted == "gloo":  # goes everywhere
        return "gloo", f"set by weights.transport (auto would be {fitting}: {why})"
    raise ConfigError(
        f"weights.transport: {wanted} is impossible between {trainer} (trainer) and {', '.join(workers)}, because {why}; "
        f"set {fitting}, or auto"
    )


def _fitting_transport(trainer: str, workers: Sequence[str]) -> tuple[TransportKind, str]:
    """The fastest transport between the devices of trainer rank 0 and of the servers' workers ("cpu", or the name of a GPU), and
    why it is that one. Beside it only gloo works."""
    if trainer == "cpu":
        return "gloo", "trainer and server are on the CPU" if "cpu" in workers else "the trainer is on the CPU"
    if "cpu" in workers:
        return "gloo", "the server is on the CPU"
    num_gpus = len({trainer, *workers})
    if num_gpus == 1:
        return "ipc", "trainer and server share a GPU"
    if num_gpus == 1 + len(workers):
        return "nccl", "trainer and servers have separate GPUs"
    return (
        "gloo",
        "some share a GPU and others do not, which neither nccl (one process per GPU) nor ipc (one GPU) supports",
    )


def gpus_of_a_server(config: ExperimentConfig, engine: EngineChoice) -> int:
    """GPUs that one server takes: none on the CPU."""
    return config.inference.gpus_of_a_server(engine.engine) if engine.on_gpu else 0
