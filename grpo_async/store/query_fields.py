"""The fields and words of the query language: what each means, and the SQL that stands for it.

The SQL is ours alone, over the tables of `index`: `r` (one row per rollout) and `g` (one row per group). What a user writes never
becomes SQL text: values are parameters, and a NAME in `reward.NAME` too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """What a field holds, and so which operators it takes."""

    NUMBER = "number"  # = != < <= > >= in
    WORD = "word"  # = != ~ !~ in; exact, or one of `values` in any case
    TEXT = "text"  # = != ~ !~
    LIST = "list"  # = != ~ !~ in, of any element
    JSON = "json"  # all of them: the data set decides what it is


class Place(StrEnum):
    """Where the values are."""

    INDEX = "index"  # in memory
    BLOCKS = "blocks"  # read from the blocks when it is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """`sql` is an expression over `r` and `g` (INDEX), or the name of a column of a block (BLOCKS); for a dynamic field
    (`reward.NAME`) the name is its one parameter."""

    name: str
    kind: Kind
    sql: str
    help: str
    place: Place = Place.INDEX
    aliases: Sequence[str] = ()
    values: Sequence[str] = ()  # all that a WORD may be; empty: anything
    example: str = ""
    dynamic: bool = False  # written with a further name: columns.NAME


@dataclass(frozen=True, slots=True, kw_only=True)
class Word:
    """A word that stands alone: `truncated`."""

    name: str
    sql: str
    help: str


ROLLOUT_STATUSES = ("finished", "truncated", "failed")
GROUP_STATUSES = ("trained", "filtered", "stale", "failed", "cancelled", "evaluated")


def _number(name: str, sql: str, text: str, *aliases: str, example: str = "") -> Field:
    return Field(name=name, kind=Kind.NUMBER, sql=sql, help=text, aliases=aliases, example=example)


_ROLLOUT = (
    _number("reward", "r.reward", "reward, as the advantage was made of it", example="reward<0.2"),
    Field(
        name="reward.NAME",
        kind=Kind.NUMBER,
        sql="r.rewards[?]",
        help="one part of the reward, by the name of its function",
        example="reward.format<1",
        dynamic=True,
    ),
    _number("advantage", "r.advantage", "advantage", example="advantage>1"),
    _number(
        "step",
        "r.step",
        "optimizer step that used, filtered or dropped it; `last` is the newest that is done",
        example="step=10..20",
    ),
    _number("length", "r.num_tokens", "tokens that the policy sampled", "num_tokens", "tokens", example="length>1k"),
    _number("completion_length", "r.num_completion_tokens", "with tool results", "num_completion_tokens"),
    _number("prompt_length", "r.num_prompt_tokens", "tokens of the prompt", "num_prompt_tokens"),
    Field(
        name="status",
        kind=Kind.WORD,
        sql="r.status",
        help="how the rollout ended",
        values=ROLLOUT_STATUSES,
        example="status=finished",
    ),
    _number("turns", "r.num_turns", "generations of the policy", "num_turns", example="turns>=3"),
    Field(
        name="tool",
        kind=Kind.LIST,
        sql="r.tool_names",
        help="a tool that was called",
        aliases=("tools", "tool_names"),
        example="tool=python and failed",
    ),
    _number("tool_calls", "r.num_tool_calls", "calls of tools", "num_tool_calls", example="tool_calls=0"),
    _number("failed_tool_calls", "r.num_failed_tool_calls", "those that failed", "num_failed_tool_calls"),
    _number("staleness", "r.staleness", "updates between its oldest token and its use", example="staleness>=2"),
    _number("version_min", "r.version_min", "oldest policy version that sampled a token", "version"),
    _number("version_max", "r.version_max", "newest policy version that sampled a token"),
    _number("entropy", "r.entropy_mean", "mean entropy of its tokens, nats", "entropy_mean", example="entropy<0.1"),
    _number("ratio", "r.ratio_mean", "mean importance weight", "ratio_mean"),
    _number("ratio_min", "r.ratio_min", "lowest importance weight of a token"),
    _number("ratio_max", "r.ratio_max", "highest importance weight of a token", example="ratio_max>5"),
    _number("clipped_share", "r.clipped_share", "share of its tokens that were clipped", example="clipped_share>10%"),
    _number("masked_share", "r.masked_share", "share of its tokens that a correction or filter left out of the loss"),
    _number("mismatch", "r.mismatch_mean", "mean |trainer - sampler| log-probability", "mismatch_mean"),
    _number("logprob", "r.logprob_mean", "mean sampler log-probability", "logprob_mean"),
    _number("logprob_min", "r.logprob_min", "lowest sampler log-probability of a token"),
    _number("duration", "r.total_duration_s", "seconds, from its start to its end", "total_duration_s"),
    _number("generation_duration", "r.generation_duration_s", "seconds of generation", "generation_duration_s"),
    _number("tool_duration", "r.tool_duration_s", "seconds in tools", "tool_duration_s", example="tool_duration>5"),
    _number("started_at", "r.started_at", "seconds since 1970"),
    _number("written_at", "r.written_at", "seconds since 1970"),
    Field(name="id", kind=Kind.WORD, sql="r.rollout_id", help="of the rollout", aliases=("rollout_id",)),
    _number("index", "r.rollout_index", "its place in the group, from 0", "rollout_index"),
    _number("seq", "r.seq", "place of its group in the order of writing"),
    Field(
        name="error",
        kind=Kind.TEXT,
        sql="r.error",
        help="why the rollout failed",
        example="error~timeout",
    ),
    _number("prompt_id", "r.prompt_id", "position of the prompt in the shuffled data"),
    Field(
        name="prompt_hash",
        kind=Kind.WORD,
        sql="r.prompt_hash",
        help="the same prompt has the same hash in every step and run",
        aliases=("hash",),
    ),
)

_GROUP = (
    _number("group.id", "r.group_id", "id of the group", "group", "group_id", example="group.id=17"),
    Field(
        name="group.status",
        kind=Kind.WORD,
        sql="r.group_status",
        help="what became of the group",
        aliases=("group_status",),
        values=GROUP_STATUSES,
        example="group.status=trained,stale",
    ),
    _number("group.size", "g.size", "rollouts in the group", "group_size"),
    _number("group.reward", "g.reward_mean", "mean reward", "group_reward_mean", example="group.reward<0.5"),
    _number(
        "group.std", "g.reward_std", "standard deviation of its rewards", "group_reward_std", example="group.std=0"
    ),
    _number("group.min", "g.reward_min", "lowest reward"),
    _number("group.max", "g.reward_max", "highest reward"),
    _number("group.scored", "g.num_scored", "rollouts that have a reward"),
    _number("group.length", "g.num_tokens_mean", "mean length"),
    _number(
        "group.truncated", "g.num_truncated / g.size", "share of truncated rollouts", example="group.truncated>50%"
    ),
    _number("group.failed", "g.num_failed / g.size", "share of failed rollouts"),
    _number("group.turns", "g.num_turns_mean", "mean number of turns"),
    _number("group.tool_calls", "g.num_tool_calls", "calls of tools, together"),
    _number("group.failed_tool_calls", "g.num_failed_tool_calls", "those that failed"),
    _number("group.staleness", "g.staleness", "the highest of its rollouts"),
    _number("group.entropy", "g.entropy_mean", "mean entropy, nats"),
    _number("group.ratio_max", "g.ratio_max", "highest importance weight"),
    _number("group.clipped_share", "g.clipped_share", "mean share of clipped tokens"),
    _number("group.masked_share", "g.masked_share", "mean share of masked tokens"),
    _number("group.mismatch", "g.mismatch_mean", "mean mismatch"),
    _number("group.duration", "g.total_duration_s", "seconds, of its longest rollout"),
    _number("group.step", "g.step", "as step"),
    _number("group.seq", "g.seq", "as seq"),
    _number("group.prompt_id", "g.prompt_id", "as prompt_id"),
    _number("group.written_at", "g.written_at", "as written_at"),
    _number("group.version_min", "g.version_min", "oldest policy version"),
)

_BLOCKS = (
    Field(
        name="text",
        kind=Kind.TEXT,
        sql="concat_ws(chr(10), prompt_text, completion_text)",
        help='prompt and completion; a quoted text alone, "what is", asks the same',
        place=Place.BLOCKS,
        example='text~"what is"',
    ),
    Field(
        name="prompt",
        kind=Kind.TEXT,
        sql="prompt_text",
        help="contents of the prompt's messages",
        place=Place.BLOCKS,
        aliases=("prompt_text",),
        example="prompt~capital",
    ),
    Field(
        name="completion",
        kind=Kind.TEXT,
        sql="completion_text",
        help="contents of the completion's messages, tool results too",
        place=Place.BLOCKS,
        aliases=("completion_text",),
        example='completion~"i cannot"',
    ),
    Field(
        name="call",
        kind=Kind.TEXT,
        sql="turns",
        help="arguments, results and errors of tool calls, as JSON",
        place=Place.BLOCKS,
        aliases=("turns_json",),
        example="call~import",
    ),
    Field(
        name="columns.NAME",
        kind=Kind.JSON,
        sql="columns",
        help="a further column of the data set",
        place=Place.BLOCKS,
        aliases=("column.NAME",),
        example="columns.answer=9",
        dynamic=True,
    ),
    Field(
        name="extra.NAME",
        kind=Kind.JSON,
        sql="extra",
        help="what a reward function noted with log_extra",
        place=Place.BLOCKS,
        example="extra.parsed=none",
        dynamic=True,
    ),
)

FIELDS: tuple[Field, ...] = (*_ROLLOUT, *_GROUP, *_BLOCKS)

WORDS: tuple[Word, ...] = (
    Word(name="truncated", sql="r.truncated", help="ended by a limit of tokens, turns or length"),
    Word(name="finished", sql="r.status = 'finished'", help="ended by itself"),
    Word(name="done", sql="r.done", help="its environment said that the episode is over"),
    Word(
        name="failed",
        sql="(r.status = 'failed' OR r.num_failed_tool_calls > 0 OR (r.rollout_id IS NULL AND r.group_status = 'failed'))",
        help="the rollout failed, or one of its tool calls",
    ),
    Word(name="trained", sql="r.group_status = 'trained'", help="its group was trained on"),
    Word(name="filtered", sql="r.group_status = 'filtered'", help="its group had nothing to learn from"),
    Word(name="stale", sql="r.group_status = 'stale'", help="its group was too old when it was wanted"),
    Word(name="cancelled", sql="r.group_status = 'cancelled'", help="its group was given up"),
    Word(name="scored", sql="r.reward IS NOT NULL", help="has a reward"),
    Word(name="unscored", sql="r.reward IS NULL", help="has no reward"),
    Word(name="clipped", sql="r.clipped_share > 0", help="a token of it was clipped"),
    Word(name="masked", sql="r.masked_share > 0", help="a token of it was left out of the loss"),
    Word(
        name="superseded",
        sql="r.superseded",
        help="left behind by a resume (shown where superseded rows are asked for)",
    ),
)

_BY_NAME = {name: field for field in FIELDS if not field.dynamic for name in (field.name, *field.aliases)}
_DYNAMIC = {
    name.removesuffix("NAME"): field for field in FIELDS if field.dynamic for name in (field.name, *field.aliases)
}
WORD_BY_NAME = {word.name: word for word in WORDS}
PREFIXES = tuple(_DYNAMIC)
"""Of the fields with a further name: "reward.", "columns.", ..."""


def find_field(name: str) -> tuple[Field, str | None] | None:
    """The field of a name, any case, with the further name of a dynamic field as it stands; None: no such field.

    `reward.exact` -> (the field reward.NAME, "exact").
    """
    lower = name.lower()
    if (field := _BY_NAME.get(lower)) is not None:
        return field, None
    for prefix, field in _DYNAMIC.items():
        if lower.startswith(prefix) and len(name) > len(prefix):
            return field, name[len(prefix) :]
    return None


def known_names() -> list[str]:
    """Every name of a field or word, for suggestions."""
    return [*_BY_NAME, *(field.name for field in _DYNAMIC.values()), *WORD_BY_NAME]
