"""The HTTP API that every inference server of a run serves: the real vLLM (with our plugin) and the embedded engine.

Every path but GET /health asks for `Authorization: Bearer $GRPO_ASYNC_TOKEN`; without the variable no token is asked for,
which the servers allow on a loopback address only. Errors are JSON `{"error": "..."}` with a fitting status.

    GET  /health                        200 once the server can generate, 503 when its engine is dead
    GET  /rollout/info                  ServerInfo
    GET  /rollout/parameters            ServedParameters: what a weight update has to bring
    POST /rollout/generate              GenerateRequest -> NDJSON stream of GenerateChunk (application/x-ndjson)
    POST /rollout/score                 ScoreRequest -> ScoreAnswer: log-probabilities of given tokens
    POST /pause?mode=M&keep_cache=B     freezes generation between two tokens; answers when it is frozen. Requests that arrive
                                        from then on wait for /resume. What is in flight, by mode:
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
generates and scores nothing: requests wait, and when the update breaks (a trainer may die at any moment) they wait for another
one, which may be that of another trainer. An update that is refused has changed nothing. A worker that cannot load what has
arrived ends its server.

Prefix caches: a server salts every request with its own policy version at the moment it takes it, so that none that it takes later
starts from a KV cache of another version's weights.

The paths outside /rollout, and `weight_version`, carry the names that vLLM gives them; both engines serve them as written here.

Token tagging: a chunk holds tokens of one policy version, stamped by the server. The server flushes a chunk when the version
changes, when the request ends, and otherwise about every `flush_interval_s`, so a client that loses the connection keeps what
was sampled until then.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from grpo_async.config.base import ComputeDtype, EngineName, MinP, RepetitionPenalty, Seconds, TopP, TransportKind
from grpo_async.records import FinishReason

PauseMode = Literal["keep", "drain", "abort"]


class ApiModel(BaseModel):
    """Base of what crosses the wire: unknown keys are refused on both sides."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class GenerateRequest(ApiModel):
    """One completion of one token sequence. Every sampling field is always sent, so no server default leaks in."""

    request_id: str
    token_ids: list[int] = Field(min_length=1)
    max_tokens: int = Field(ge=1)
    temperature: float = Field(ge=0.0)
    """0 is greedy; logprobs are then of the unscaled distribution."""
    top_p: TopP = 1.0
    """The fewest most likely tokens whose probabilities add up to it; 1 = all."""
    top_k: int = Field(default=0, ge=0)
    """The number of most likely tokens to sample from; 0 = all."""
    min_p: MinP = 0.0
    """Tokens at least this times as likely as the most likely one; 0 = all."""
    repetition_penalty: RepetitionPenalty = 1.0
    """Of every token that `token_ids` or the output has, a logit above 0 is divided by it, another multiplied with it
    (arXiv 1909.05858), before the temperature."""
    structured_outputs: dict[Literal["json", "regex", "choice", "grammar"], Any] | None = Field(
        default=None, min_length=1, max_length=1
    )
    """A constraint on the output, under the name that vLLM's StructuredOutputsParams has for it; other engines refuse it. What was
    sampled before must not be among `token_ids`: the constraint begins with the first token."""
    seed: int = 0
    """Of the embedded engine: a token depends on seed, context and weights, whatever else is in flight (to float rounding). A
    continuation, which has the same seed and more context, goes on as the undisturbed request would have. vLLM does not use it: all
    requests draw from one stream, that of the server."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Generation ends after sampling one of these; the token is part of the output."""
    stop: list[Annotated[str, Field(min_length=1)]] = Field(default_factory=list)
    """Generation ends with the token that completes one of these in the text of what this request has sampled (without special
    tokens); all of its tokens are part of the output, the last one whole, even where it has text beyond the string."""
    ignore_eos: bool = False
    flush_interval_s: float = Field(default=4.0, ge=0.0)
    """What a broken connection loses at most; every chunk costs the client CPU time, whatever is in it. The client asks for less
    where a limit of silence is short."""
    instance_id: str = ""
    """The server this request is meant for (ServerInfo.instance_id); any other answers 503, as does one that has restarted
    since: its weights are not those the caller counts on. Empty: any."""


class GenerateChunk(ApiModel):
    """One line of the answer. The last line has a finish_reason or an error.

    `logprobs` are of the distribution that was sampled from: log_softmax(logits / temperature), natural log, of the tokens that the
    settings leave.
    """

    token_ids: list[int] = Field(default_factory=list)
    logprobs: list[float] = Field(default_factory=list)
    policy_version: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    """The one of `stop` that ended it."""
    error: str | None = None


class ServerInfo(ApiModel):
    """What a server says of itself."""

    engine: EngineName
    instance_id: str = ""
    """Random, new for every start of a server."""
    model: str
    dtype: ComputeDtype
    """dtype of the weights as served."""
    head_dtype: ComputeDtype | None = None
    """dtype in which it computes logits; null: that of the weights."""
    max_model_len: int
    vocab_size: int = 0
    """Rows of the embedding; a token id is below it."""
    policy_version: int
    num_workers: int = 1
    """Processes that join the weight group (vLLM: tensor-parallel size)."""
    active_requests: int = 0
    """Requests that are not answered to their end; those that a pause holds back, or others, included."""
    running_requests: int = 0
    """Of these, the ones that the engine generates for."""
    waiting_requests: int = 0
    """Of these, the ones that wait inside the engine for room."""
    kv_usage: float | None = None
    """Fraction of the KV cache in use; null where the engine does not say."""
    max_running_requests: int | None = None
    """Most requests that the engine generates for at once; null where it does not say."""
    generated_tokens: int = 0
    """Since the server started."""
    busy_s: float = 0.0
    """Seconds since start in which at least one request was generating (not paused)."""


class ServedParameters(ApiModel):
    """The parameters that a weight update has to bring, all of them, under the names of the model's checkpoint."""

    shapes: dict[str, list[int]]
    """Empty when the server cannot know them (vLLM with --load-format dummy)."""
    optional: list[str] = Field(default_factory=list)
    """Names that may be left out or given: a head that is tied to the embedding."""
    base_digest: str | None = None
    """Of the files that the server was started from (weights.adapters); null when it cannot add adapters to them."""


class ScoreRequest(ApiModel):
    """A token sequence to be scored, on the weights that serve now."""

    token_ids: list[int] = Field(min_length=2)


class ScoreAnswer(ApiModel):
    """log softmax(logits) at temperature 1, natural log: entry i is of token_ids[i + 1] given those before it."""

    logprobs: list[float]
    policy_version: int


class WeightInitInfo(ApiModel):
    """Where a server's workers meet the trainer: in its TCP store (weights.backends), group rank 0 = trainer rank 0."""

    transport: TransportKind = "gloo"
    master_address: str
    """Of the trainer in the group."""
    master_port: int = Field(ge=1, le=65_535)
    """Of the trainer's TCP store."""
    rank_offset: int
    """Group rank of this server's first worker."""
    world_size: int
    """1 + number of workers of all servers in the group."""
    timeout_s: Seconds
    key: str = Field(pattern=r"^weights/[0-9a-f]{1,64}$")
    """Prefix in the store: random, new for every connect, and known to the members alone."""

    @model_validator(mode="after")
    def _can_exist(self) -> Self:
        if not 1 <= self.rank_offset < self.world_size:
            raise ValueError(
                f"rank_offset {self.rank_offset} is not the rank of a worker among {self.world_size} members"
            )
        return self


class AdapterBase(ApiModel):
    """What pushed adapters belong to."""

    digest: str
    """Of the trainer's base; must be the server's own."""
    dtype_name: str
    """In which the merged weights are served."""


class WeightUpdateInfo(ApiModel):
    """The parameters that follow, in the order they are sent; both sides cut them into buckets by the same rule. Each bucket has
    `timeout_s` from the end of the one before."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    bucket_bytes: int = Field(ge=1)
    timeout_s: Seconds
    base: AdapterBase | None = None
    """Set: what follows are factors of adapters (weights.adapters), and not whole parameters."""


class PauseQuery(ApiModel):
    """Query of /pause."""

    mode: PauseMode = "keep"
    keep_cache: bool = False
    timeout_s: Seconds = 600.0
    """Longest wait for requests in flight with mode=drain, in seconds."""


class FinishBody(ApiModel):
    """Body of /finish_weight_update."""

    weight_version: str = Field(pattern=r"^\d{1,18}$")
