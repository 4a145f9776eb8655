"""The HTTP surface that every inference server of a run serves: the real vLLM (with our plugin) and the embedded engine.

Every path but GET /health asks for `Authorization: Bearer $GRPO_ASYNC_TOKEN`; without the variable no token is asked for,
which the servers allow on a loopback address only. Errors are JSON `{"error": "..."}` with a fitting status.

    GET  /health                        200 once the server can generate, 503 when its engine is dead
    GET  /rollout/info                  ServerInfo
    POST /rollout/generate              GenerateRequest -> NDJSON stream of GenerateChunk (application/x-ndjson)
    POST /pause?mode=keep               freezes generation between two tokens; answers when it is frozen. Requests that
                                        arrive while paused wait. In-flight requests go on after /resume, over a context
                                        recomputed with whatever weights are then loaded
    POST /resume                        always allowed, also when not paused
    GET  /is_paused                     {"is_paused": bool}; goes through the engine, so it is the real liveness probe
    POST /init_weight_transfer_engine   {"init_info": GlooInitInfo}: joins the weight group (again, after a trainer restart)
    POST /start_weight_update           {} : begins an update
    POST /update_weights                {"update_info": GlooUpdateInfo}: receives every bucket, then applies all or nothing
    POST /finish_weight_update          {"weight_version": "17"}: the policy version of every token from now on

The paths outside /rollout carry the names that vLLM gives them; both engines serve them as written here.

Token tagging: a chunk holds tokens of one policy version, stamped by the server. The server flushes a chunk when the version
changes, when the request ends, and otherwise about every `flush_interval_s`, so a client that loses the connection keeps what
was sampled until then.
"""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

TOKEN_VARIABLE = "GRPO_ASYNC_TOKEN"
GENERATE_PATH = "/rollout/generate"
INFO_PATH = "/rollout/info"


def token_from_environment() -> str | None:
    """The run's bearer token, or None. It travels by environment only: argv is visible to every user of a machine."""
    return os.environ.get(TOKEN_VARIABLE) or None


class Message(BaseModel):
    """Base of what crosses the wire: unknown keys are refused on both sides."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GenerateRequest(Message):
    """One completion of one token sequence. Every sampling field is always sent, so no server default leaks in."""

    request_id: str
    token_ids: list[int] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0.0)
    """0 is greedy; logprobs are then of the unscaled distribution."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0)
    """0 = all."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    seed: int = 0
    """The same seed, prompt and weights give the same tokens whatever else is in flight (to float rounding)."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Generation ends after sampling one of these; the token is part of the output."""
    ignore_eos: bool = False
    cache_salt: str = ""
    """Requests with different salts never share prefix cache; the client sends the policy version."""
    flush_interval_s: float = Field(default=0.2, ge=0.0)


class GenerateChunk(Message):
    """One line of the answer. The last line has a finish_reason or an error.

    `logprobs` are of the distribution that was sampled from: log_softmax(logits / temperature), natural log.
    """

    token_ids: list[int] = Field(default_factory=list)
    logprobs: list[float] = Field(default_factory=list)
    policy_version: int = 0
    finish_reason: Literal["stop", "length", "abort"] | None = None
    error: str | None = None


class ServerInfo(Message):
    """What a server says of itself."""

    engine: Literal["vllm", "embedded"]
    engine_version: str
    model: str
    dtype: Literal["float32", "bfloat16", "float16"]
    """dtype of the weights as served."""
    max_model_len: int
    policy_version: int
    num_workers: int = 1
    """Processes that join the weight group (vLLM: tensor-parallel size)."""
    per_request_seed: bool = True
    """False where the engine cannot honour `seed` (vLLM on CPU, see serve-vllm)."""
    active_requests: int = 0
    generated_tokens: int = 0
    """Since the server started."""
    busy_s: float = 0.0
    """Seconds since start in which at least one request was generating (not paused)."""


class GlooInitInfo(Message):
    """Where a server's workers meet the trainer: a TCP store on the trainer, group rank 0 = trainer rank 0."""

    master_address: str
    master_port: int
    rank_offset: int
    """Group rank of this server's first worker."""
    world_size: int
    """1 + number of server workers."""
    timeout_s: float
    key: str
    """Prefix in the store, new for every connect."""


class GlooUpdateInfo(Message):
    """The parameters that follow, in the order of the broadcast; both sides cut them into buckets by the same rule."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_bytes: int
    timeout_s: float
