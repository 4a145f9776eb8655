"""The sections of the inference servers and of the way that weights take to them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from grpo_async.config.base import (
    ComputeDtype,
    Count,
    EngineName,
    FilePath,
    Host,
    Processes,
    PushMode,
    Seconds,
    ServerUrl,
    StrictModel,
    TransportKind,
)

MAX_RESTART_DELAY_S = 60.0
"""The longest between the end of a server and its next start."""


class VllmOptions(StrictModel):
    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Fraction of a GPU's memory that vLLM takes (GPU only), `kv_cache_mb` set aside. null = 0.9 on GPUs of its own; on one that it
    shares with the trainer, what the trainer leaves (the plan says how much)."""
    tensor_parallel_size: Processes = 1
    """GPUs that share each layer of the model."""
    pipeline_parallel_size: Processes = 1
    """Stages, each with some of the layers and its own GPUs."""
    data_parallel_size: Processes = 1
    """Copies of the model behind one URL. For mixtures of experts, with `expert_parallel`; others gain more from `replicas`."""
    expert_parallel: bool = False
    """Divide the experts of a layer among all GPUs of `tensor_parallel_size` and `data_parallel_size`."""
    kv_cache_mb: int | None = Field(default=None, ge=16)
    """Keys and values in MiB, on each GPU of a server. null = 512 on a CPU; on a GPU what `gpu_memory_utilization` leaves after
    the weights."""
    enforce_eager: bool = False
    """Skip graph capture and compilation: starts faster, generates slower."""
    sleep_while_training: bool = False
    """On a GPU shared with the trainer: give the server's memory back while a step trains. Only with
    `rollout.max_staleness: 0`, where the server has nothing to do then."""
    extra_args: list[str] = Field(default_factory=list)
    """Further arguments of vLLM's own server, as they are."""

    @property
    def num_gpus(self) -> int:
        """Of one server: tensor_parallel_size x pipeline_parallel_size x data_parallel_size."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.data_parallel_size


class EmbeddedOptions(StrictModel):
    max_slots: Count = 64
    """Completions generated at once; more wait."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the embedded engine runs."""


class TlsOptions(StrictModel):
    certificate: FilePath | None = None
    """PEM file with the certificate (and chain) of servers that `train` or `serve-vllm` start."""
    key: FilePath | None = None
    """PEM file with its private key."""
    ca_certs: FilePath | None = None
    """PEM file with the certificates that the trainer trusts; null = `certificate`, else those of the system."""

    @model_validator(mode="after")
    def _certificate_and_key_go_together(self) -> Self:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("certificate and key go together: give both (servers of this run) or neither (`urls`)")
        return self

    @property
    def trusted(self) -> Path | None:
        """PEM file of the certificates that a client trusts; None: those of the system."""
        return self.ca_certs or self.certificate


class InferenceSection(StrictModel):
    engine: Literal["auto", EngineName] = "auto"
    """vllm: the real vLLM server. embedded: a small engine on transformers, for machines without vLLM.
    auto: vllm where it is installed and its platform is usable, else embedded; the plan says which and why."""
    urls: list[ServerUrl] = Field(default_factory=list)
    """Servers that already run (`grpo-async serve-vllm`), instead of those spawned by `train`; one that is not up yet may
    join later. Their token: $GRPO_ASYNC_TOKEN."""
    replicas: Processes = 1
    """Servers that `train` starts on each machine that serves, or `serve-vllm` on one; each takes as many GPUs as the sizes under
    `vllm` multiply to. With `urls` only `serve-vllm` reads it."""
    host: Host = "127.0.0.1"
    """Address that a spawned server binds. On several machines each binds its own in the network that they share, or all of them
    where this is 0.0.0.0."""
    tls: TlsOptions | None = None
    """HTTPS between trainer and servers."""
    dtype: ComputeDtype | None = None
    """dtype of the served weights; weights are cast to it before they are sent. null: bfloat16 on a GPU, float32 on a CPU."""
    max_model_len: int = Field(default=2048, ge=8)
    """Longest prompt + completion in tokens."""
    threads: Processes = 1
    """CPU threads of a server's compute."""
    startup_timeout_s: Seconds = 600.0
    """Longest time until a server answers /health, also after a restart. vLLM compiles for minutes when it first starts on a
    machine. Where it is not set, a second is added for each 100 MB of the model's files: 2000 s for 140 GB."""
    request_timeout_s: Seconds = 300.0
    """Longest silence of the server within one request."""
    max_retries: int = Field(default=5, ge=0)
    """Retries of one request after connection errors and answers >= 500; 4xx is never retried."""
    heartbeat_interval_s: Seconds = 2.0
    """Each server is asked this often whether its engine still answers."""
    heartbeat_timeout_s: Seconds = 30.0
    """A server whose engine does not answer for so long counts as hung: its requests go elsewhere, and it is restarted."""
    max_restarts: int = Field(default=3, ge=0)
    """Consecutive restarts after which a spawned server is given up. The run ends when none is left."""
    restart_delay_s: float = Field(default=1.0, ge=0.0, le=2e6)
    """Wait before the first restart; doubled for each consecutive one, a minute at most."""
    vllm: VllmOptions = VllmOptions()
    """Options of the vLLM server."""
    embedded: EmbeddedOptions = EmbeddedOptions()
    """Options of the embedded engine."""

    @field_validator("urls")
    @classmethod
    def _urls_differ(cls, urls: list[str]) -> list[str]:
        twice = sorted({url for url in urls if urls.count(url) > 1})
        if twice:
            raise ValueError(f"named more than once: {twice}")
        return urls

    @property
    def dtype_in_use(self) -> ComputeDtype:
        """`dtype`, and where it is null that of a CPU: `ExperimentConfig.with_dtypes` fills it in where there is a GPU."""
        return self.dtype or "float32"

    @property
    def longest_outage_s(self) -> float:
        """Until the only server either serves again or is given up: every restart with its longest delay and start."""
        return (self.max_restarts + 1) * (self.startup_timeout_s + MAX_RESTART_DELAY_S)

    @property
    def scheme(self) -> str:
        """Of the servers that this run starts."""
        return "https" if self.tls is not None and self.tls.certificate is not None else "http"


class WeightsSection(StrictModel):
    transport: Literal["auto", TransportKind] = "auto"
    """gloo: over TCP, on CPU and everywhere. nccl: between GPUs. ipc: trainer and server share one GPU.
    auto: what fits the machine; the plan says which and why."""
    mode: PushMode = "recompute"
    """What happens to requests in flight. recompute: they freeze, then continue with the new weights over a context recomputed with
    them. keep_kv: they continue with the KV cache of the old weights (no recomputation; in-flight updates, PipelineRL).
    drain: the push waits until all have finished. abort: they are aborted and sent again with the tokens they have."""
    bucket_mb: int | None = Field(default=None, ge=1)
    """Parameters travel in buckets of this many MiB. null: a 64th of the weights, from 8 to 256 MiB, and less where the trainer's
    GPU has little room. Trainer and servers each hold two of them in addition to the weights."""
    timeout_s: Seconds = 120.0
    """Deadline of each phase of a push; while weights travel, of each bucket."""
    drain_timeout_s: Seconds = 600.0
    """Longest wait for requests in flight with `mode: drain`."""
    host: Host | None = None
    """Address of the trainer's machine (node rank 0) on which the weight group meets. null = the one that reaches the servers:
    127.0.0.1 where they are on the same machine."""
    verify_every_pushes: int = Field(default=25, ge=0)
    """After every Nth push, and when a server joins, log-probabilities of trainer and servers are compared on fixed probe
    sequences, and the run stops when they differ (the preflight does so after the first push in any case). 0: never. Finds weights
    that are wrong, not those that are a step of a small learning rate behind: that is within rounding, in bfloat16 above all."""
    verify_tolerance: float | None = Field(default=None, gt=0.0)
    """Largest mean absolute difference of log-probabilities, in nats. null: twice what rounding does to the trainer's own, which
    computes the same tokens twice; at least 1e-3, at most 0.5."""

    def bucket_bytes(self, num_bytes: int) -> int:
        """Size of the buckets of an update of `num_bytes`, where there is room for them; see `bucket_mb`.

        Worked examples: 400 MB -> 8 MiB, 50 buckets; 8B in bfloat16 (16 GB) -> 250 MB; 70B (140 GB) -> 256 MiB, about 550 buckets,
        5 ms each at 50 GB/s.
        """
        if self.bucket_mb is not None:
            return self.bucket_mb << 20
        return min(max(num_bytes // 64, 8 << 20), 256 << 20)
