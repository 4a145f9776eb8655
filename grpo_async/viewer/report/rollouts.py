"""What the report shows of the rollout store: how many there are, the best, the worst, and the prompts that changed most."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.errors import RunError
from grpo_async.records import TaggedMessage

if TYPE_CHECKING:
    from grpo_async.store.rows import GroupRow, RolloutRow
    from grpo_async.store.summaries import Histogram, PromptChange
    from grpo_async.store.table import RolloutTable

_NUM_EXTREMES = 4
_SAMPLED = "step>=0 and length>0 and not failed"
_MOST_LISTED = 12  # messages of errors, names of tools
_LONGEST_TEXT = 6_000  # characters of a prompt or a completion; more is cut in the middle
_LONGEST_ERROR = 160
_HISTOGRAM_BINS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One rollout with its text. `prompt` and `completion` are as the data and the model wrote them: hostile, perhaps."""

    rollout_id: str
    step: int | None
    status: str
    reward: float | None
    rewards: Mapping[str, float | None]
    num_tokens: int
    num_tool_calls: int
    error: str | None
    prompt: str
    completion: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A prompt that was seen in several steps: the mean reward of its first and its last group, and a typical rollout of each."""

    first_reward: float
    last_reward: float
    first: Example
    last: Example


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFacts:
    """All of it; empty where there is no store."""

    num_rollouts: int = 0
    num_groups: int = 0
    num_sampled: int = 0  # with a token, seen by a step, not failed
    num_unscored: int = 0  # of them, those without a reward
    best: Sequence[Example] = ()
    worst: Sequence[Example] = ()
    improved: Sequence[Change] = ()
    worsened: Sequence[Change] = ()
    rewards: Histogram | None = None
    lengths: Histogram | None = None
    tools: Sequence[tuple[str, int]] = ()  # name, in how many rollouts it was called; the most frequent first
    errors: Sequence[tuple[str, int]] = ()  # message, of how many failed rollouts; the most frequent first
    notes: Sequence[str] = ()

    def without_texts(self) -> RolloutFacts:
        """The same without examples."""
        return replace(self, best=(), worst=(), improved=(), worsened=())


def read_rollouts(folder: Path) -> RolloutFacts:
    """Look through a store. What keeps it from being read is a note, not an error."""
    import duckdb

    from grpo_async.store.table import RolloutTable

    if not folder.is_dir():
        return RolloutFacts(notes=(f"There are no rollouts: {folder.name}/ is missing.",))
    try:
        with RolloutTable.open(folder) as table:
            return _read(table)
    except (RunError, OSError, duckdb.Error) as error:
        return RolloutFacts(notes=(f"The rollouts cannot be read: {error}",))


def _read(table: RolloutTable) -> RolloutFacts:
    from grpo_async.store.query import parse_query

    everything = parse_query("")
    counts = table.count(everything)
    if counts.rollouts == 0:
        return RolloutFacts(notes=tuple(table.notes) or ("There are no rollouts: none was stored yet.",))
    extremes = table.extremes(everything, _NUM_EXTREMES)
    return RolloutFacts(
        num_rollouts=counts.rollouts,
        num_groups=counts.groups,
        num_sampled=table.count(parse_query(_SAMPLED)).rollouts,
        num_unscored=table.count(parse_query(f"{_SAMPLED} and unscored")).rollouts,
        best=[_example(*table.rollout(each.rollout_id)) for each in extremes.best],
        worst=[_example(*table.rollout(each.rollout_id)) for each in extremes.worst],
        improved=[_change(table, each) for each in extremes.improved],
        worsened=[_change(table, each) for each in extremes.worsened],
        rewards=table.histogram("reward", everything, bins=_HISTOGRAM_BINS),
        lengths=table.histogram("length", everything, bins=_HISTOGRAM_BINS),
        tools=table.facets("tools", everything, limit=_MOST_LISTED),
        errors=_errors(table.facets("error", parse_query("status = 'failed'"), limit=_MOST_LISTED)),
        notes=tuple(table.notes),
    )


def _errors(found: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for message, count in found:  # two long messages may begin and end alike
        short = shortened(" ".join(message.split()), _LONGEST_ERROR)
        counts[short] = counts.get(short, 0) + count
    return sorted(counts.items(), key=lambda item: -item[1])


def _change(table: RolloutTable, change: PromptChange) -> Change:
    first, last = change.first.reward_mean or 0.0, change.last.reward_mean or 0.0
    return Change(
        first_reward=first,
        last_reward=last,
        first=_typical(table.group(change.first.group_id), first),
        last=_typical(table.group(change.last.group_id), last),
    )


def _typical(group: GroupRow, mean: float) -> Example:
    """The scored rollout whose reward is next to the mean of its group."""

    def distance(rollout: RolloutRow) -> float:
        return float("inf") if rollout.reward is None else abs(rollout.reward - mean)

    return _example(group, min(group.rollouts, key=distance))


def _example(group: GroupRow, rollout: RolloutRow) -> Example:
    """One rollout as the report shows it."""
    prompt = group.messages if rollout.reset_messages is None else rollout.reset_messages
    return Example(
        rollout_id=rollout.rollout_id,
        step=group.step,
        status=rollout.status.value,
        reward=rollout.reward,
        rewards=rollout.rewards,
        num_tokens=rollout.num_tokens,
        num_tool_calls=sum(len(turn.tool_calls) for turn in rollout.turns),
        error=rollout.error,
        prompt=shortened(_conversation(prompt), _LONGEST_TEXT),
        completion=shortened(_conversation(rollout.messages), _LONGEST_TEXT),
    )


def _conversation(messages: Sequence[TaggedMessage]) -> str:
    """One message: its text. Several: "[role]" above each."""
    if len(messages) == 1 and not messages[0].tool_calls:
        return messages[0].content
    return "\n\n".join(_message(message) for message in messages)


def _message(message: TaggedMessage) -> str:
    calls = [f"call {_call(call)}" for call in message.tool_calls]
    return "\n".join([f"[{message.role}]", *([message.content] if message.content else []), *calls])


def _call(call: Mapping[str, object]) -> str:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return str(call)
    return f"{function.get('name')}({function.get('arguments')})"


def shortened(text: str, limit: int) -> str:
    """At most about `limit` characters: the beginning and the end of a longer text, which says how much is missing."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"
