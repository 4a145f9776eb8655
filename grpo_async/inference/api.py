"""The HTTP API that every inference server of a run serves: vLLM (with our plugin) and the embedded engine.

Every path except GET /health requires `Authorization: Bearer $GRPO_ASYNC_TOKEN`; without the variable no token is required,
which the servers allow only on a loopback address. Errors are JSON `{"error": "..."}` with a fitting status.

    GET  /health                        200 once the server can generate, 503 when its engine is dead
    GET  /rollout/info                  ServerInfo
    GET  /rollout/parameters            ServedParameters: what a weight update has to contain
    POST /rollout/generate              GenerateRequest -> NDJSON stream of GenerateChunk (application/x-ndjson)
    POST /rollout/score                 ScoreRequest -> ScoreAnswer: log-probabilities of given tokens
    POST /pause?mode=M&keep_cache=B     freezes generation between two tokens; answers when it is frozen. Later requests
                                        wait for /resume. Requests in flight, by mode:
                                          keep   stays and continues after /resume
                                          drain  runs to its end first (&timeout_s=S: 504 when it has not by then; not paused)
                                          abort  ends at once with finish_reason "abort" and all tokens it has
                                        keep_cache=false (default): what continues recomputes its context with whatever weights
                                        are then loaded. true: it continues over the KV cache it has
    POST /resume                        allowed when not paused, too; 409 while a part of an update is loaded
    GET  /is_paused                     {"is_paused": bool}; goes through the engine, so it is the real liveness probe
    POST /init_weight_transfer_engine   WeightInitInfo: joins the weight group (again, after a trainer restart)
    POST /start_weight_update           WeightUpdateInfo: says what follows; refused when it does not fit the model
    POST /update_weights                {}: receives every parameter and loads it in place. The server has to be paused
    POST /finish_weight_update          {"weight_version": "17"}: "17" is the policy version of every token from now on

    POST /sleep                         (vLLM on a GPU) gives the GPU's memory back; no request runs until /wake_up
    POST /wake_up                       (vLLM on a GPU) takes the memory again, and resumes

Weights are loaded as they arrive. From /update_weights to /finish_weight_update a server may hold parts of two versions, so it
generates and scores nothing: requests wait, and if the update breaks (a trainer may die at any moment) they wait for the next
one, which may come from another trainer. A refused update has changed nothing. A worker that cannot load parameters that
arrived ends its server.

Prefix caches: no request starts from a KV cache of other weights, even if they had the same version (a trainer that went back to a
checkpoint). With keep_cache=true, requests in flight continue over theirs.

The paths outside /rollout, and `weight_version`, have the names that vLLM gives them; both engines serve them as described here.

Token tagging: a chunk holds tokens of one policy version, stamped by the server. The server flushes a chunk when the version
changes, when the request ends, and otherwise about every `flush_interval_s`, so a client that loses the connection keeps what
was sampled until then.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from grpo_async.config.base import ComputeDtype, EngineName, MinP, RepetitionPenalty, Seconds, TopP, TransportKind
from grpo_async.records import FinishReason

PauseMode = Literal["keep", "drain", "abort"]

OUT_OF_ORDER = 409
"""Status of a call that the server cannot make in its present state, such as /resume with a part of an update loaded."""
NOT_DRAINED = 504
"""Status of a /pause that could not drain in time."""
KEEP_ALIVE_S = 600
"""Idle connections are closed by servers after this time, and by clients after half of it: a request that is sent into a connection
that is just being closed is lost."""


class ApiModel(BaseModel):
    """Base of all messages: unknown keys are refused on both sides."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GenerateRequest(ApiModel):
    """One completion of one token sequence. Every sampling field is always sent, so no server default applies."""

    request_id: str
    token_ids: list[int] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0.0)
    """0 is greedy; logprobs are then those of the unscaled distribution."""
    top_p: TopP = 1.0
    """Sample from the fewest most likely tokens whose probabilities add up to this; 1 = all."""
    top_k: int = Field(default=0, ge=0)
    """The number of most likely tokens to sample from; 0 = all."""
    min_p: MinP = 0.0
    """Sample from tokens whose probability is at least this fraction of that of the most likely one; 0 = all."""
    repetition_penalty: RepetitionPenalty = 1.0
    """For every token in `token_ids` or the output, a positive logit is divided by this and any other is multiplied by it
    (arXiv 1909.05858), before the temperature."""
    structured_outputs: dict[Literal["json", "regex", "choice", "grammar", "structural_tag"], Any] | None = Field(
        default=None, min_length=1, max_length=1
    )
    """A constraint on the output, named as in vLLM's StructuredOutputsParams; the embedded engine needs xgrammar for it.
    `token_ids` must not contain tokens that were sampled before: the constraint begins with the first token."""
    seed: int = 0
    """Used by the embedded engine: a token depends on seed, context and weights, whatever else is in flight (to float rounding). A
    continuation, which has the same seed and more context, samples what the uninterrupted request would have. vLLM does not use it:
    all requests draw from one random stream, that of this start of the server."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Generation ends after sampling one of these; the token is part of the output."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Generation ends with the token that completes one of these in the text that this request has sampled (without special
    tokens). All of its tokens are part of the output, including a last token with text beyond the string."""
    ignore_eos: bool = False
    flush_interval_s: float = Field(default=4.0, ge=0.0)
    """The most that a broken connection loses; every chunk costs the client CPU time, whatever it contains. The client asks for
    less if a limit of silence is short."""
    instance_id: str = ""
    """The server for which this request is meant (ServerInfo.instance_id). Any other answers 503, as does one that has restarted
    since: its weights are not those that the caller expects. Empty: any."""


class GenerateChunk(ApiModel):
    """One line of the answer. The last line has a finish_reason or an error.

    `logprobs` are those of the distribution that was sampled from: log_softmax(logits / temperature), natural log, of the tokens
    that the settings leave.
    """

    token_ids: list[int] = Field(default_factory=list)
    logprobs: list[float] = Field(default_factory=list)
    policy_version: int = 0
    offset: int | None = None
    """Number of tokens in the lines before: a line that is repeated, lost or out of order shows."""
    request_id: str = ""
    """That of the request."""
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    """The string of `stop` that ended it."""
    error: str | None = None


class ServerInfo(ApiModel):
    """What a server reports about itself."""

    model_config = ConfigDict(allow_inf_nan=False)

    engine: EngineName
    instance_id: str = ""
    """Random, new for every start of a server."""
    model: str
    dtype: ComputeDtype
    """dtype of the served weights."""
    head_dtype: ComputeDtype | None = None
    """dtype in which it computes logits; null: the dtype of the weights."""
    max_model_len: PositiveInt
    vocab_size: NonNegativeInt = 0
    """Rows of the embedding; every token id is below it."""
    policy_version: NonNegativeInt
    num_workers: PositiveInt = 1
    """Processes that join the weight group (vLLM: tensor-parallel size)."""
    active_requests: NonNegativeInt = 0
    """Requests that are not finished, including those that wait for the end of a pause."""
    running_requests: NonNegativeInt = 0
    """The active requests for which the engine generates."""
    waiting_requests: NonNegativeInt = 0
    """The active requests that wait inside the engine for room."""
    kv_usage: NonNegativeFloat | None = None
    """Fraction of the KV cache in use; null if the engine does not report it."""
    max_running_requests: PositiveInt | None = None
    """Maximum number of requests for which the engine generates at once; null if it does not report it."""
    generated_tokens: NonNegativeInt = 0
    """Tokens generated since the server started."""
    busy_s: NonNegativeFloat = 0.0
    """Seconds since start in which at least one request was generating (not paused)."""


class ServedParameters(ApiModel):
    """The parameters that a weight update has to contain, all of them, under the names of the model's checkpoint."""

    shapes: dict[str, list[int]]
    """Empty if the server cannot know them (vLLM with --load-format dummy)."""
    optional: list[str] = Field(default_factory=list)
    """Names that may be sent or omitted: a head that is tied to the embedding."""
    base_digest: str | None = None
    """Digest of the files that the server was started from (weights.adapters); null if adapters cannot be added to them."""


class ScoreRequest(ApiModel):
    """A token sequence to score with the served weights."""

    token_ids: list[int] = Field(min_length=2)


class ScoreAnswer(ApiModel):
    """log softmax(logits) at temperature 1, natural log: entry i is the score of token_ids[i + 1] given those before it."""

    logprobs: list[float]
    policy_version: int


class WeightInitInfo(ApiModel):
    """Where a server's workers meet the trainer: in its TCP store (weights.backends), group rank 0 = trainer rank 0."""

    transport: TransportKind = "gloo"
    master_address: str
    """Address of the trainer in the group."""
    master_port: int = Field(ge=1, le=65_535)
    """Port of the trainer's TCP store."""
    rank_offset: int
    """Group rank of this server's first worker."""
    world_size: int
    """1 + number of workers of all servers in the group."""
    timeout_s: Seconds
    key: str = Field(pattern=r"^weights/[0-9a-f]{1,64}$")
    """Prefix in the store: random, new for every connect, and known only to the members."""

    @model_validator(mode="after")
    def _can_exist(self) -> Self:
        if not 1 <= self.rank_offset < self.world_size:
            raise ValueError(
                f"rank_offset {self.rank_offset} is not the rank of a worker among {self.world_size} members"
            )
        return self


class AdapterBase(ApiModel):
    """The base to which pushed adapters are added."""

    digest: str
    """Digest of the trainer's base; must equal the server's own."""
    dtype_name: str
    """dtype in which the merged weights are served."""


class WeightUpdateInfo(ApiModel):
    """The parameters that follow, in the order in which they are sent; both sides divide them into buckets by the same rule. Each
    bucket has `timeout_s` from the end of the previous one."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_bytes: int = Field(ge=1)
    timeout_s: Seconds
    base: AdapterBase | None = None
    """If set, factors of adapters follow (weights.adapters), not whole parameters."""


class PauseQuery(ApiModel):
    """Query of /pause."""

    mode: PauseMode = "keep"
    keep_cache: bool = False
    timeout_s: Seconds = 600.0
    """With mode=drain, the longest wait for requests in flight, in seconds."""


class FinishBody(ApiModel):
    """Body of /finish_weight_update."""

    weight_version: str = Field(pattern=r"^\d{1,18}$")
