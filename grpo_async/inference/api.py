"""The HTTP API that every inference server of a run serves: vLLM (with our plugin) and the embedded engine.

Every path except GET /health requires `Authorization: Bearer $GRPO_ASYNC_TOKEN`; without the variable no token is required,
which the servers allow only on a loopback address. Errors are JSON `{"error": "..."}` with a fitting status.

    GET  /health                        200 once the server can generate, 503 when its engine is dead
    GET  /rollout/info                  ServerInfo
    GET  /rollout/parameters            ServedParameters: what a weight update has to contain
    POST /rollout/generate              GenerateRequest -> NDJSON stream of GenerateChunk (application/x-ndjson)
    POST /rollout/score                 ScoreRequest -> ScoreAnswer: log-probabilities of given tokens
    POST /pause?mode=M&keep_cache=B     freezes generation between two tokens. Requests in flight stay (keep) or end at once with
                                        what they have (abort); later ones wait. Without keep_cache, what
                                        continues recomputes its context with the new weights
    POST /resume                        allowed when not paused, too; 409 while a part of an update is loaded
    GET  /is_paused                     {"is_paused": bool}; goes through the engine, so it is the real liveness probe
    POST /init_weight_transfer_engine   WeightInitInfo: joins the weight group (again, after a trainer restart)
    POST /start_weight_update           WeightUpdateInfo: says what follows; refused when it does not fit the model
    POST /update_weights                {}: receives every parameter and loads it in place. The server has to be paused, except
                                        for adapters that are swapped: a request keeps the one it began with, and its version
    POST /finish_weight_update          {"weight_version": "17"}: "17" is the policy version of every token from now on
    POST /sleep                         (vLLM on a GPU) gives the GPU's memory back; no request runs until /wake_up
    POST /wake_up                       (vLLM on a GPU) takes the memory again, and resumes

From /update_weights to /finish_weight_update a server generates and scores nothing; if the update breaks, requests wait for the
next one, which may come from another trainer. No request starts from a KV cache of other weights, even of the same version. A chunk
holds tokens of one version, stamped by the server.
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

from grpo_async.config.base import (
    MAX_TOP_LOGPROBS,
    ComputeDtype,
    EngineName,
    MinP,
    RepetitionPenalty,
    Seconds,
    TopP,
    TransportKind,
)
from grpo_async.records import FinishReason

PauseMode = Literal["keep", "abort"]
OUT_OF_ORDER = 409  # status of a call that the server cannot make in its present state
KEEP_ALIVE_S = 600  # servers close idle connections after it, clients after half of it: no request meets a closing one


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
    """A constraint on the output, named as in vLLM's StructuredOutputsParams; the embedded engine has none.
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
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    """Also report this many of the likeliest tokens at each position; not more than the vocabulary has."""
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

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    token_ids: list[int] = Field(default_factory=list)
    logprobs: list[float] = Field(default_factory=list)
    top_logprobs: list[bytes] = Field(default_factory=list)
    """The likeliest tokens at the position of each token, in base64: that many pairs of id and logprob (records.TOP), in any
    order. Those that the settings remove have -inf. Empty if the request asks for none."""
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
    num_workers: PositiveInt = 1  # processes that join the weight group
    active_requests: NonNegativeInt = 0  # not finished, including those that wait for the end of a pause
    running_requests: NonNegativeInt = 0  # of the active ones, those for which the engine generates
    waiting_requests: NonNegativeInt = 0  # ... and those that wait inside the engine for room
    kv_usage: NonNegativeFloat | None = None  # fraction of the KV cache; null if the engine does not report it
    max_running_requests: PositiveInt | None = None
    generated_tokens: NonNegativeInt = 0  # since the server started
    busy_s: NonNegativeFloat = 0.0  # seconds since then in which something was generated


class ServedParameters(ApiModel):
    """The parameters that a weight update has to contain, all of them, under the names of the model's checkpoint."""

    shapes: dict[str, list[int]]
    """Empty if the server cannot know them (vLLM with --load-format dummy)."""
    optional: list[str] = Field(default_factory=list)
    """Names that may be sent or omitted: a head that is tied to the embedding."""
    base_digest: str | None = None
    """Digest of the files that the server was started from (weights.adapters); null if adapters cannot be added to them."""
    swaps_adapters: bool = False
    """Updates are adapters that the engine keeps beside its weights (WeightUpdateInfo.swap), and nothing else."""


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
    master_port: int = Field(ge=1, le=65_535)
    rank_offset: int  # group rank of this server's first worker
    world_size: int  # 1 + number of workers of all servers in the group
    timeout_s: Seconds
    key: str = Field(pattern=r"^weights/[0-9a-f]{1,64}$")  # in the store: random, new for every connect

    @model_validator(mode="after")
    def _can_exist(self) -> Self:
        if not 1 <= self.rank_offset < self.world_size:
            raise ValueError(
                f"rank_offset {self.rank_offset} is not the rank of a worker among {self.world_size} members"
            )
        return self


class AdapterBase(ApiModel):
    """The base to which pushed adapters are added."""

    digest: str  # must equal that of the server's own
    dtype_name: str  # of the merged weights that are served


class WeightUpdateInfo(ApiModel):
    """The parameters that follow, in the order in which they are sent; both sides divide them into buckets by the same rule. A last
    bucket has their digests. Each has `timeout_s` from the end of the previous one."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_bytes: int = Field(ge=1)
    timeout_s: Seconds
    base: AdapterBase | None = None
    """If set, factors of adapters follow (weights.adapters), not whole parameters."""
    swap: bool = False
    """The factors become a new adapter, beside the weights and the adapters of requests in flight, and nothing pauses."""


class PauseQuery(ApiModel):
    """Query of /pause."""

    mode: PauseMode = "keep"
    keep_cache: bool = False


class Paused(ApiModel):
    """Answer of /pause, /resume and /is_paused. The counts are those of a /pause without `keep_cache`."""

    is_paused: bool
    recomputed_tokens: NonNegativeInt = 0
    """Prompts and answers of the requests that go on: their KV cache is lost, so they are computed again."""
    computed_tokens: NonNegativeInt = 0
    """Prompts and sampled tokens since the last such pause."""


class FinishBody(ApiModel):
    """Body of /finish_weight_update."""

    weight_version: str = Field(pattern=r"^\d{1,18}$")
