"""Which process gets which GPU, and what follows from it: dtypes, the transport of the weights, how memory is divided."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

from grpo_async.checks.memory import ADVICE, ModelSize, bytes_beside_vllm, describe, server_memory, trainer_memory
from grpo_async.checks.model_files import text_config
from grpo_async.config import ExperimentConfig
from grpo_async.config.base import TransportKind
from grpo_async.config.rules import conflicts
from grpo_async.config.sections import ModelSection
from grpo_async.errors import ConfigError
from grpo_async.servers.engine_choice import EngineChoice
from grpo_async.servers.vllm.command import CPU_CACHE_MB, OWN_GPU_FRACTION
from grpo_async.training.families import swaps_adapters
from grpo_async.utils.files import downloaded_file
from grpo_async.utils.text import count, format_bytes


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


def fill_in_for_devices(config: ExperimentConfig, engine: EngineChoice, gpus: Sequence[str]) -> ExperimentConfig:
    """Fill in what `config` leaves open and devices decide; servers that run already get the dtype of the trainer's device."""
    on_gpu = trains_on_gpu(config, gpus)
    config = config.for_devices(
        trains_on_gpu=on_gpu, serves_on_gpu=on_gpu if engine.engine == "external" else engine.on_gpu
    )
    if (lora := config.model.lora) is None or lora.push is not None:
        return config
    merged, swapped = (
        config.model_copy(
            update={"model": config.model.model_copy(update={"lora": lora.model_copy(update={"push": push})})}
        )
        for push in ("merged", "adapter_swap")
    )
    return swapped if engine.engine == "vllm" and engine.on_gpu and _can_swap(swapped) else merged


def _can_swap(config: ExperimentConfig) -> bool:
    """Whether vLLM can keep the adapters beside the weights of the model's files, and is known to compute them rightly."""
    is_rounded = config.model.dtype != "float32" and config.inference.resolved_dtype == "float32"
    if is_rounded or config.inference.vllm.sleep_while_training or conflicts(config):
        return False
    return swaps_adapters(text_config(_folder(config.model)))


def _folder(model: ModelSection) -> Path:
    """A folder with the model's config.json, fetched from the hub if need be; without one where it cannot be had."""
    folder = Path(model.path)
    if folder.is_dir():
        return folder
    if (file := downloaded_file(model.path, "config.json", model.revision)) is not None:
        return file.parent
    from huggingface_hub import hf_hub_download  # slow import

    with suppress(OSError, ValueError):  # no network, no such model; who loads it says more
        return Path(hf_hub_download(model.path, "config.json", revision=model.revision)).parent
    return folder


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
        notes.append(f"GPU {','.join(idle)}: not used by this run")
    return replace(shares, notes=tuple(notes))


def plan_transport(config: ExperimentConfig, engine: EngineChoice, shares: GpuShares) -> tuple[TransportKind, str]:
    """How the weights travel, and why. `shares` are of the machine with rank 0, which sends them."""
    wanted = config.weights.transport
    if config.adapter_slots and engine.engine == "embedded":
        raise ConfigError("model.lora.push: adapter_swap: the embedded engine keeps no adapters; set adapter or merged")
    if config.model.lora is not None and config.model.lora.push == "adapter":
        return (
            "gloo",
            "only the adapters are sent (model.lora.push), and each server adds them to the weights of its files",
        )
    trainer = ["its GPU"] if config.launch.device == "cuda" else ["cpu"]
    if shares.trainer:
        trainer = [f"GPU {gpu}" for gpu in shares.trainer]
    workers = [f"GPU {gpu}" for gpus in shares.servers for gpu in gpus or ()]
    if engine.engine == "external":
        if wanted == "auto" and trainer != ["cpu"]:
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
        f"weights.transport: {wanted} is impossible between {trainer[0]} (trainer) and {', '.join(workers)}, because {why}; "
        f"set {fitting}, or auto"
    )


def _fitting_transport(trainer: Sequence[str], workers: Sequence[str]) -> tuple[TransportKind, str]:
    """The fastest transport between the trainer's ranks and the servers, by device ("cpu", or the name of a GPU), and
    why it is that one. Beside it only gloo works."""
    if trainer[0] == "cpu":
        return "gloo", "trainer and server are on the CPU" if "cpu" in workers else "the trainer is on the CPU"
    if "cpu" in workers:
        return "gloo", "the server is on the CPU"
    if set(workers) <= set(trainer):
        return "ipc", "every server shares its GPUs with ranks of the trainer"
    if len({trainer[0], *workers}) == 1 + len(workers):
        return "nccl", "trainer and servers have separate GPUs"
    return "ipc", "some servers share GPUs with ranks of the trainer; the others get the weights over gloo"


def gpus_of_a_server(config: ExperimentConfig, engine: EngineChoice) -> int:
    return config.inference.gpus_of_a_server(engine.engine) if engine.on_gpu else 0


# ---- memory ----
# vLLM measures free memory at its start; other work on the GPU at that moment makes the result wrong. So on a shared GPU it is told
# the size of its KV cache (`--kv-cache-memory-bytes`), at the first start and at every restart.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """What each trainer rank and each server takes, in words ("": it is not known); `cache_mb`: what a vLLM that shares its GPU is
    to take for its KV cache."""

    trainer: str = ""
    server: str = ""
    cache_mb: int | None = None
    notes: tuple[str, ...] = ()


def plan_memory(config: ExperimentConfig, engine: EngineChoice, shares: GpuShares, gpu_bytes: int | None) -> MemoryPlan:
    """Estimate what each process takes. `gpu_bytes`: of the smallest GPU; None: there is none, or its size is not known."""
    options, model = config.inference.vllm, ModelSize.read(config.model.path)
    num_sharing = shares.most_servers_on_a_gpu if shares.shared and engine.engine == "vllm" else 0
    cache_mb = options.kv_cache_mb if engine.on_gpu else options.kv_cache_mb or CPU_CACHE_MB
    if num_sharing and cache_mb is None and (model is None or gpu_bytes is None):
        missing = "the size of the model (a hub name)" if model is None else "the memory of the GPU"
        raise ConfigError(
            f"inference.vllm.kv_cache_mb: trainer and server share GPU {','.join(shares.shared)}, and {missing} is not known "
            "before the start, so it cannot be divided; set how many MiB vLLM should use for the KV cache"
        )
    if model is None:
        return MemoryPlan(trainer="not known before the model is loaded", cache_mb=cache_mb if num_sharing else None)
    trainer, server = trainer_memory(config, model), server_memory(config, model, config.inference.max_model_len)
    beside = bytes_beside_vllm(config, model) if num_sharing else 0.0
    sequence = server.pop("KV cache")
    if cache_mb is None and gpu_bytes is not None:
        room = (options.gpu_memory_utilization or OWN_GPU_FRACTION) * gpu_bytes
        if num_sharing and options.gpu_memory_utilization is None:
            room = (gpu_bytes - beside) / num_sharing
        # with less than a sequence vLLM does not start
        cache_mb = max(math.floor((room - sum(server.values())) / 2**20), math.ceil(sequence / 2**20))
    text = ""
    needs = {"the trainer": sum(trainer.values()) if shares.trainer else 0.0}
    if engine.engine == "vllm" and cache_mb is not None:
        server["KV cache"] = cache_mb << 20
        tokens = server["KV cache"] / sequence * config.inference.max_model_len
        text = f"{describe(server)}, room for {tokens:,.0f} tokens, estimated"
        who = "the trainer and vLLM next to it" if num_sharing else "vLLM"
        needs[who] = beside + (num_sharing or 1) * sum(server.values())
    return MemoryPlan(
        trainer=f"{describe(trainer)}, estimated",
        server=text,
        cache_mb=cache_mb if num_sharing else None,
        notes=tuple(
            f"probably too little memory: {who} {format_bytes(size)}, a GPU {format_bytes(gpu_bytes)}; {ADVICE}"
            for who, size in needs.items()
            if gpu_bytes is not None and size > gpu_bytes
        ),
    )
