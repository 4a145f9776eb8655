"""What the report shows of the rollout store: how many there are, the best, the worst, and the prompts that changed most."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import duckdb

from grpo_async.errors import RunError
from grpo_async.store.query import EVERYTHING, parse_query
from grpo_async.store.rows import GroupRow, RolloutRow
from grpo_async.store.summaries import Histogram, PromptChange
from grpo_async.store.table import RolloutTable
from grpo_async.viewer.format import conversation, prompt_of

_NUM_EXTREMES = 4
_SAMPLED = "step>=0 and length>0 and not failed"
_MAX_LISTED = 12  # messages of errors, names of tools
_MAX_TEXT = 6_000  # characters of a prompt or a completion; more is cut in the middle
_MAX_ERROR = 160
_HISTOGRAM_BINS = 24


@dataclass(frozen=True, slots=True)
class Example:
    """One rollout and its group. Their texts are as the data and the model wrote them: hostile, perhaps."""

    group: GroupRow
    rollout: RolloutRow

    @property
    def prompt(self) -> str:
        return shortened(conversation(prompt_of(self.group, self.rollout)), _MAX_TEXT)

    @property
    def completion(self) -> str:
        return shortened(conversation(self.rollout.messages), _MAX_TEXT)

    @property
    def num_tool_calls(self) -> int:
        return sum(len(turn.tool_calls) for turn in self.rollout.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A prompt that was seen in several steps: the mean reward of its first and its last group, and a typical rollout of each."""

    first_reward: float
    last_reward: float
    first: Example
    last: Example


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOverview:
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

    def without_texts(self) -> RolloutOverview:
        """The same without examples."""
        return replace(self, best=(), worst=(), improved=(), worsened=())


def read_rollouts(folder: Path) -> RolloutOverview:
    """Look through a store. What keeps it from being read is a note, not an error."""
    if not folder.is_dir():
        return RolloutOverview(notes=(f"There are no rollouts: {folder.name}/ is missing.",))
    try:
        with RolloutTable.open(folder) as table:
            return _read(table)
    except (RunError, OSError, duckdb.Error) as error:
        return RolloutOverview(notes=(f"The rollouts cannot be read: {error}",))


def _read(table: RolloutTable) -> RolloutOverview:
    counts = table.count()
    if counts.rollouts == 0:
        return RolloutOverview(notes=tuple(table.notes) or ("There are no rollouts: none was stored yet.",))
    extremes = table.extremes(EVERYTHING, _NUM_EXTREMES)
    return RolloutOverview(
        num_rollouts=counts.rollouts,
        num_groups=counts.groups,
        num_sampled=table.count(parse_query(_SAMPLED)).rollouts,
        num_unscored=table.count(parse_query(f"{_SAMPLED} and unscored")).rollouts,
        best=[Example(*table.rollout(each.rollout_id)) for each in extremes.best],
        worst=[Example(*table.rollout(each.rollout_id)) for each in extremes.worst],
        improved=[_change(table, each) for each in extremes.improved],
        worsened=[_change(table, each) for each in extremes.worsened],
        rewards=table.histogram("reward", EVERYTHING, bins=_HISTOGRAM_BINS),
        lengths=table.histogram("length", EVERYTHING, bins=_HISTOGRAM_BINS),
        tools=table.facets("tools", EVERYTHING, limit=_MAX_LISTED),
        errors=_errors(table.facets("error", parse_query("status = 'failed'"), limit=_MAX_LISTED)),
        notes=tuple(table.notes),
    )


def _errors(found: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for message, count in found:  # two long messages may begin and end alike
        short = shortened(" ".join(message.split()), _MAX_ERROR)
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

    return Example(group, min(group.rollouts, key=distance))


def shortened(text: str, limit: int) -> str:
    """At most about `limit` characters: the beginning and the end of a longer text, which says how much is missing."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters left out ...] {text[-half:]}"
