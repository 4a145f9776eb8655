"""The records that travel through the pipeline: plain frozen dataclasses, standard library and numpy only.

    Prompt -> RolloutCompletion (TurnRecord...) -> RolloutGroup -> RolloutSample

Invariant: token-in/token-out. A token that the policy sampled is stored once, as the id that was sampled,
together with its logprob and the policy version that sampled it; text is only ever derived from it.

Columns with an entry per token are numpy arrays from the end of a turn's generation to the tensors of a step: int32 ids and
versions, float32 logprobs, bool masks. Records that have some are equal only to themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag, StrEnum
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
TopArray = NDArray[np.void]
"""The K tokens that a sampler finds likeliest at each position, of TOP. (n, K)"""
TOP = np.dtype([("id", "<i4"), ("logprob", "<f4")])

MAX_REWARD = 1e9
"""The largest size of a reward or an advantage: with every weight that can be set, sums and squares stay within float32."""

THINKING = (("<think>", "</think>"), ("[THINK]", "[/THINK]"))
"""The tags before and after the thinking of a turn, of most models and of Mistral's."""


TEMPLATE_COLUMN = "chat_template_kwargs"
"""The column of variables of the chat template for a row."""


def answer_start(text: str, *, is_open: bool | None = None) -> int:
    """Where the thinking at the beginning of a turn ends; the length of the text where it does not end. "<think>a</think>b" -> 16.

    `is_open`: whether the generation prompt opened the thinking. None if that is unknown: then it did if `text` closes a thinking
    that it did not open.
    """
    written = [pair for pair in THINKING if text.lstrip().startswith(pair[0])]
    if written or is_open is not False:
        for _, closing in written or THINKING:
            if (end := text.find(closing)) >= 0:
                return end + len(closing)
    return len(text) if written or is_open else 0


AGENT_REWARD = "agent"
"""Name of the reward that an agent returns for its own rollout."""


class Origin(StrEnum):
    """Who wrote a message."""

    PROMPT = "prompt"  # came with the data
    POLICY = "policy"  # sampled by the policy
    TOOL = "tool"  # a tool's result
    ENVIRONMENT = "environment"  # text from an environment


def origin_of(role: str, default: Origin) -> Origin:
    """Who wrote a message of this role; `default` where the role does not tell, as with "user"."""
    return {"system": Origin.PROMPT, "assistant": Origin.POLICY, "tool": Origin.TOOL}.get(role, default)


class FinishReason(StrEnum):
    """Why a turn's generation ended."""

    STOP = "stop"  # the policy sampled an end-of-turn token, or completed a stop string
    LENGTH = "length"  # the token limit was reached
    ABORT = "abort"  # the server or the client cancelled the request


class RolloutStatus(StrEnum):
    """How a rollout ended."""

    FINISHED = "finished"  # ended by itself: final answer, or the environment is done
    TRUNCATED = "truncated"  # cut by a token, turn or length limit
    FAILED = "failed"  # an error; carries no trainable tokens

    @property
    def is_trainable(self) -> bool:
        return self in (RolloutStatus.FINISHED, RolloutStatus.TRUNCATED)


class GroupStatus(StrEnum):
    """The state of a group. Every group that was started for training is in exactly one of the first seven."""

    TRAINED = "trained"  # used by an optimizer step
    FILTERED = "filtered"  # nothing to learn from: equal rewards or none, only truncated completions, no sampled token
    STALE = "stale"  # older than `rollout.max_staleness` allows
    FAILED = "failed"  # fewer than two of its rollouts are trainable, scoring raised, or its update was not finite
    CANCELLED = "cancelled"  # the run stopped; its prompt is issued again after a resume
    QUEUED = "queued"  # scored, waiting for the trainer
    IN_FLIGHT = "in_flight"  # generating or being scored
    EVALUATED = "evaluated"  # of held-out prompts: not in the ledger, only in the store of an evaluation

    @property
    def is_final(self) -> bool:
        return self not in (GroupStatus.IN_FLIGHT, GroupStatus.QUEUED)


LEDGER_STATUSES = tuple(status for status in GroupStatus if status is not GroupStatus.EVALUATED)
FINAL_STATUSES = tuple(status for status in LEDGER_STATUSES if status.is_final)


def is_call_id(text: str) -> bool:
    """Whether every chat template accepts it as the id of a call: nine letters and digits, as the strictest (Mistral's) wants."""
    return len(text) == 9 and text.isascii() and text.isalnum()


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call of a turn, as parsed from its text. A call that cannot be read has an `error`, which goes back to the policy as
    the call's result; its `name` is "" where not even that could be read."""

    tool_call_id: str = ""  # see `is_call_id`
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """In the form that chat templates and reward functions take (OpenAI's, with `arguments` as an object)."""
        function = {"name": self.name, "arguments": dict(self.arguments)}
        return {"id": self.tool_call_id, "type": "function", "function": function}

    def result_message(self, text: str) -> TaggedMessage:
        """The message with which a tool answers it."""
        return TaggedMessage(
            role="tool", content=text, origin=Origin.TOOL, name=self.name, tool_call_id=self.tool_call_id
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TaggedMessage:
    """One chat message and who wrote it.

    `tool_calls` are those of an assistant's message in the OpenAI form (`ToolCall.as_dict`); `name` and `tool_call_id` say
    which call a message of role "tool" answers.
    """

    role: str
    content: str
    origin: Origin
    tool_calls: Sequence[Mapping[str, Any]] = ()
    name: str | None = None
    tool_call_id: str | None = None

    @classmethod
    def from_dict(cls, message: Mapping[str, Any], origin: Origin) -> TaggedMessage:
        """The opposite of `as_dict`."""
        return cls(
            role=message["role"],
            content=message.get("content") or "",
            origin=origin,
            tool_calls=tuple(message.get("tool_calls") or ()),
            name=message.get("name"),
            tool_call_id=message.get("tool_call_id"),
        )

    def as_dict(self) -> dict[str, Any]:
        """In the form that chat templates and reward functions take: {"role", "content"}, and the other fields if set."""
        message: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.tool_calls:
            message["tool_calls"] = [dict(call) for call in self.tool_calls]
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCallRecord:
    """One tool call of one turn, after it was made. `duration_s` is wall-clock seconds.

    An agent makes its calls itself: `result` is what it told the policy ("" when it told nothing). Whether a call failed and how
    long it took is unknown: `failed` is None and `duration_s` 0.0. `returned` is the list that the tool returned, which reward
    functions get as the content of its message, as in TRL; None if it returned no list.
    """

    tool_call_id: str
    name: str
    arguments: Mapping[str, Any]
    result: str
    failed: bool | None
    duration_s: float
    returned: list[Any] | None = None


def joined(dtype: type[np.generic], parts: Iterable[NDArray[Any]]) -> NDArray[Any]:
    """One array of all parts, which have this dtype; without any an empty one."""
    return np.concatenate([np.empty(0, dtype), *parts])


def no_tokens() -> IntArray:
    return np.empty(0, np.int32)


def top_array(rows: bytes, num_tokens: int) -> TopArray | None:
    """The likeliest tokens at each of some positions, from their bytes; None if they were not asked for."""
    return np.frombuffer(rows, TOP).reshape(num_tokens, -1) if rows else None


def as_arrays(record: object, **dtypes: type[np.generic]) -> None:
    """Make arrays of these fields of a frozen record, for its `__post_init__`. What is one already is not copied."""
    for name, dtype in dtypes.items():
        object.__setattr__(record, name, np.asarray(getattr(record, name), dtype=dtype))


def oldest_of(versions: Iterable[IntArray]) -> int | None:
    """The least entry of all arrays; None when there is none."""
    return min((int(each.min()) for each in versions if each.size), default=None)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TurnRecord:
    """One generation of the policy and what followed it.

    `output_ids`, `output_logprobs` and `policy_versions` have equal length, one entry per sampled token.
    `tool_response_ids` is the suffix (tool results, next generation prompt) appended before the next turn.
    """

    output_ids: IntArray
    output_logprobs: FloatArray
    policy_versions: IntArray
    finish_reason: FinishReason
    stop_reason: str | None = None  # the stop string that ended it
    messages: Sequence[TaggedMessage] = ()
    tool_calls: Sequence[ToolCallRecord] = ()
    tool_response_ids: IntArray = field(default_factory=no_tokens)
    parse_error: str | None = None  # why the text could not be searched for tool calls; the message then has all of it
    is_trained: bool = True  # False: it was sampled under a constraint of its call, and is context only
    generation_duration_s: float = 0.0
    tool_execution_duration_s: float = 0.0
    started_at: float = 0.0  # of its generation, seconds since the epoch; 0.0: not known
    output_top: TopArray | None = None  # (n, K), for `loss.score_centering` and the sampling mask

    def __post_init__(self) -> None:
        as_arrays(self, output_ids=np.int32, output_logprobs=np.float32, policy_versions=np.int32)
        as_arrays(self, tool_response_ids=np.int32)
        lengths = (len(self.output_ids), len(self.output_logprobs), len(self.policy_versions))
        if len(set(lengths)) != 1:
            raise ValueError(
                f"a turn needs one logprob and one version per token, got ids/logprobs/versions = {lengths}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One row of the data.

    `prompt_id` is the position in the endless shuffled stream (epoch * len + position), so it is unique in a run
    and the same after a resume. `messages` is the conversation so far; `columns` holds every other column.
    """

    prompt_id: int
    messages: Sequence[TaggedMessage]
    columns: Mapping[str, Any] = field(default_factory=dict)
    is_conversational: bool = True  # False: the data gave plain text, and reward functions get plain text back
    source: str | None = None  # the label of its source, where there are several
    rewards: Sequence[str] | None = None  # names of the reward functions that score it; None: all
    temperature: float | None = None  # None: that of the run
    group_size: int | None = None  # None: that of the run

    def as_given(self, messages: Sequence[TaggedMessage] | None = None) -> Any:
        """The prompt as reward functions, environments and rollout functions get it: a list of message dicts, or plain text
        (without the system prompt that the config may put before it). `messages` replace the prompt's own."""
        messages = self.messages if messages is None else messages
        if self.is_conversational:
            return [message.as_dict() for message in messages]
        return messages[-1].content


class TokenPath:
    """A prompt and the turns that followed it, as token columns: what becomes one sample.

    Worked example: prompt ids [1, 2]; turn 0 samples [3, 4] and a tool answers with the suffix [9]; turn 1 samples [5]:
    completion_ids = [3, 4, 9, 5], completion_mask = [1, 1, 0, 1], logprobs of the suffix token = 0.0.
    """

    __slots__ = ()

    prompt_ids: IntArray
    turns: Sequence[TurnRecord]

    @property
    def completion_ids(self) -> IntArray:
        return joined(np.int32, chain.from_iterable((t.output_ids, t.tool_response_ids) for t in self.turns))

    @property
    def completion_mask(self) -> BoolArray:
        """True for tokens that the policy sampled, False for tool and environment tokens, and for turns that are not trained."""
        return self._column(np.bool_, lambda turn: np.ones(len(turn.output_ids), np.bool_), elsewhere=False)

    @property
    def logprobs(self) -> FloatArray:
        """Sampler logprob per completion token; 0.0 where the mask is False."""
        return self._column(np.float32, lambda turn: turn.output_logprobs, elsewhere=0.0)

    @property
    def policy_versions(self) -> IntArray:
        """Policy version per completion token; -1 where the mask is False."""
        return self._column(np.int32, lambda turn: turn.policy_versions, elsewhere=-1)

    @property
    def top(self) -> TopArray | None:
        """The likeliest tokens where the mask is True. (n, K)"""
        parts = [turn.output_top for turn in self.turns if turn.is_trained and len(turn.output_ids)]
        known = [part for part in parts if part is not None]
        return np.concatenate(known) if known and len(known) == len(parts) else None

    def _column(
        self, dtype: type[np.generic], sampled: Callable[[TurnRecord], NDArray[Any]], *, elsewhere: float
    ) -> NDArray[Any]:
        """One entry per completion token: `sampled` of each turn that is trained, `elsewhere` for all other tokens."""
        parts: list[NDArray[Any]] = []
        for turn in self.turns:
            parts.append(sampled(turn) if turn.is_trained else np.full(len(turn.output_ids), elsewhere, dtype))
            parts.append(np.full(len(turn.tool_response_ids), elsewhere, dtype))
        return joined(dtype, parts)

    @property
    def num_own_tokens(self) -> int:
        """Tokens that the policy sampled in this path."""
        return sum(len(t.output_ids) for t in self.turns)

    def completion_messages(self) -> list[TaggedMessage]:
        """The messages of the completion only, each once."""
        return [message for turn in self.turns for message in turn.messages]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Branch(TokenPath):
    """A further path of a rollout whose agent did not only append to its history: it edited or compacted it, asked twice, or gave
    a part of the work to another agent.

    `prompt_ids` is everything before its first own turn. It may contain tokens that were sampled in another path; they are trained
    there, and not here.
    """

    name: str  # "b1", "b2", ...: those of a rollout in the order of their first answers
    parent: int  # whose beginning it shares: 0 = the rollout's own prompt and turns, n = branch n
    prompt_ids: IntArray
    turns: Sequence[TurnRecord]
    prompt_messages: Sequence[TaggedMessage] = ()  # the messages that `prompt_ids` encodes
    reward: float | None = None  # its own, if the agent gave one; None: it has that of the rollout

    def __post_init__(self) -> None:
        as_arrays(self, prompt_ids=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutCompletion(TokenPath):
    """One rollout: the prompt's ids and the turns that followed, and, of an agent that changed its history, `branches`.

    `prompt_messages` are the messages that `prompt_ids` encodes, if they are not those of the prompt: an environment's reset
    changed them, or an agent wrote its own. `environment_rewards` maps the class name of the rollout's environment to what its
    `get_reward` said (None = no reward), and AGENT_REWARD to what an agent returned; `reward_columns` are extra columns that a
    custom rollout function or an agent returned for this rollout.
    """

    rollout_id: str
    prompt_ids: IntArray
    turns: Sequence[TurnRecord]
    status: RolloutStatus
    done: bool = False  # the environment said the episode is over
    error: str | None = None
    total_duration_s: float = 0.0
    prompt_messages: Sequence[TaggedMessage] | None = None
    tool_names: Sequence[str] = ()  # the tools that were offered, called or not
    environment_rewards: Mapping[str, float | None] = field(default_factory=dict)
    reward_columns: Mapping[str, Any] = field(default_factory=dict)
    started_at: float = 0.0  # seconds since the epoch; 0.0: not known
    branches: Sequence[Branch] = ()

    def __post_init__(self) -> None:
        as_arrays(self, prompt_ids=np.int32)

    @property
    def truncated(self) -> bool:
        return self.status is RolloutStatus.TRUNCATED

    @property
    def paths(self) -> list[TokenPath]:
        """The rollout's own prompt and turns, then its branches: each may become a sample."""
        return [self, *self.branches]

    def sample_id(self, path: TokenPath) -> str:
        """Id of the sample that one of `paths` becomes: "g7-r0" of the rollout's own turns, "g7-r0.b1" of its first branch."""
        return f"{self.rollout_id}.{path.name}" if isinstance(path, Branch) else self.rollout_id

    @property
    def all_turns(self) -> list[TurnRecord]:
        """The turns of all `paths`."""
        return [turn for path in self.paths for turn in path.turns]

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens that the policy sampled in all `paths`."""
        return sum(path.num_own_tokens for path in self.paths)

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the sampled tokens of all paths; None when nothing was sampled."""
        return oldest_of(turn.policy_versions for turn in self.all_turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """All completions of one prompt."""

    prompt: Prompt
    completions: Sequence[RolloutCompletion]

    @property
    def group_id(self) -> int:
        """The prompt's: one that is issued again keeps its seeds and its place in the data."""
        return self.prompt.prompt_id

    @property
    def name(self) -> str:
        """ "g7", of rollouts "g7-r0", "g7-r1", ...; during an evaluation "eval-v40-7"."""
        return self.completions[0].rollout_id.rpartition("-r")[0]

    @property
    def trainable(self) -> list[RolloutCompletion]:
        return [c for c in self.completions if c.status.is_trainable and c.num_sampled_tokens > 0]


def root_id(rollout_id: str) -> str:
    """Id of the rollout to which an id of a rollout or a branch belongs: "g7-r0.b1" and "g7-r0" -> "g7-r0"."""
    return rollout_id.partition(".")[0]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RolloutSample:
    """One trainable row: prompt and completion of one rollout, or of one of its branches (`rollout_id` is then "g7-r0.b1").

    `token_ids`, `loss_mask`, `sampler_logprobs` and `policy_versions` have equal length; in the prompt and wherever
    the mask is False, the logprob is 0.0 and the version -1.
    """

    group_id: int
    rollout_id: str
    token_ids: IntArray
    loss_mask: BoolArray
    sampler_logprobs: FloatArray
    policy_versions: IntArray
    advantage: float
    rewards: Mapping[str, float | None]
    reward: float | None
    truncated: bool
    teacher_logprobs: FloatArray | None = None
    """With distillation: the sum over the teachers of weight x log-probability, 0.0 in the prompt. As long as the others."""
    teacher_weight: float = 0.0
    """The sum of these weights."""
    top: TopArray | None = None
    """The likeliest tokens at each trained token's position (num_trained_tokens, K), if the loss needs them."""
    temperature: float | None = None  # None: that of the run

    def __post_init__(self) -> None:
        as_arrays(self, token_ids=np.int32, loss_mask=np.bool_, sampler_logprobs=np.float32, policy_versions=np.int32)
        if self.teacher_logprobs is not None:
            as_arrays(self, teacher_logprobs=np.float32)
        lengths = (len(self.token_ids), len(self.loss_mask), len(self.sampler_logprobs), len(self.policy_versions))
        if len(set(lengths)) != 1:
            raise ValueError(f"a sample needs equal lengths, got ids/mask/logprobs/versions = {lengths}")
        if self.top is not None and len(self.top) != self.num_trained_tokens:
            raise ValueError(f"{self.num_trained_tokens} trained tokens, and {len(self.top)} rows of likeliest tokens")

    @property
    def root_id(self) -> str:
        """Id of the rollout to which the sample belongs; see `root_id`."""
        return root_id(self.rollout_id)

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among the trained tokens."""
        return int(self.policy_versions[self.loss_mask].min())


class TokenFlag(IntFlag):
    """How the objective treated a token; several may be set."""

    CLIPPED_LOW = 1  # the ratio was below the clip range, and the token has no gradient
    CLIPPED_HIGH = 2  # the ratio was above it
    IMPORTANCE_MASKED = 4  # left out by the mask of loss.correction
    OFF_POLICY_MASKED = 8  # its sequence was left out by loss.off_policy_mask or geometric_mask
    # 16 is not reused: rollouts stored before the first release may have it, from a setting that was removed
    SKIPPED = 32  # its update was not finite, and was not made


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenStats:
    """The trainer's numbers for the trained tokens of one sample, in their order. All sequences have the length
    `num_trained_tokens`; they may be numpy arrays (float32, uint8).

    `logprobs` are those of the policy in the forward of its update, `proximal_logprobs` those that the ratio of the loss is taken
    against, `weights` the importance weight that was used (the correction's where there is one, else the ratio of the loss).
    """

    logprobs: Sequence[float]
    proximal_logprobs: Sequence[float]
    weights: Sequence[float]
    entropies: Sequence[float]  # nats
    flags: Sequence[int]  # TokenFlag


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredGroup:
    """A group after scoring. `samples` is empty when the group has no learning signal and is not to be trained.

    `rewards`, `reward_parts` and the lists of `extra_columns` are aligned with `group.trainable`. `reward_parts` has the rewards of
    each completion by name, `rewards` their weighted sum. `metrics` is what the reward functions logged with `log_metric`,
    `extra_columns` what they logged with `log_extra`.
    """

    group: RolloutGroup
    samples: Sequence[RolloutSample]
    rewards: Sequence[float | None]
    reward_parts: Sequence[Mapping[str, float | None]]
    metrics: Mapping[str, float] = field(default_factory=dict)
    extra_columns: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def group_id(self) -> int:
        return self.group.group_id

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among all trained tokens; None when nothing is to be trained."""
        return min((sample.oldest_version for sample in self.samples), default=None)
