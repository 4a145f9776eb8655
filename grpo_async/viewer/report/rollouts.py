"""What the report shows of the rollout stores: how many there are, the best, the worst, the prompts that changed most, and what
became of the held-out ones between the first evaluation and the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import duckdb

from grpo_async.errors import RunError
from grpo_async.run_directory import RunDir
from grpo_async.store.query import EVERYTHING, parse_query
from grpo_async.store.rows import GroupRow, RolloutRow
from grpo_async.store.summaries import GroupSummary, PromptChange
from grpo_async.store.table import RolloutTable
from grpo_async.utils.text import both_ends
from grpo_async.viewer.format import conversation, prompt_of

_NUM_EXTREMES = 4
_SAMPLED = "step>=0 and length>0 and not failed"
_MAX_LISTED = 12  # messages of errors
_MAX_TEXT = 6_000  # characters of a prompt or a completion; more is cut in the middle
_MAX_ERROR = 160
_NUM_HELD_OUT = 6
_MAX_HELD_OUT = 10_000  # groups of an evaluation that are compared


@dataclass(frozen=True, slots=True)
class RolloutExample:
    """One rollout and its group. Their texts are as the data and the model wrote them: hostile, perhaps."""

    group: GroupRow
    rollout: RolloutRow

    @property
    def prompt(self) -> str:
        return both_ends(conversation(prompt_of(self.group, self.rollout)), _MAX_TEXT)

    @property
    def completion(self) -> str:
        return both_ends(conversation(self.rollout.messages), _MAX_TEXT)

    @property
    def num_tool_calls(self) -> int:
        return sum(len(turn.tool_calls) for turn in self.rollout.turns)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptPair:
    """A prompt that was seen in several steps: the mean reward of its first and its last group, and a typical rollout of each."""

    first_reward: float
    last_reward: float
    first: RolloutExample
    last: RolloutExample


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """The held-out prompts in two evaluations. `changes`: what changed most comes first, the gains before the losses, or where the
    mean fell the losses before the gains."""

    first_step: int
    last_step: int
    changes: Sequence[PromptChange]

    @property
    def has_fallen(self) -> bool:
        return sum(each.change for each in self.changes) < 0.0

    @property
    def outcome(self) -> str:
        """How many got better, worse, or stayed. Rewards before -> after 0 -> 1, 1 -> 1, 0 -> 0: "1 better, 0 worse, 1 right both
        times, 1 wrong both times"; where rewards are not just right or wrong: "1 better, 0 worse, 2 unchanged"."""
        better, worse = (sum(sign * each.change > 0.0 for each in self.changes) for sign in (1, -1))
        same = [each.last.reward_mean for each in self.changes if each.change == 0.0]
        right, wrong = same.count(1.0), same.count(0.0)
        rewards = {reward for each in self.changes for reward in (each.first.reward_mean, each.last.reward_mean)}
        is_known = bool(same) and rewards <= {0.0, 1.0}
        stayed = f"{right} right both times, {wrong} wrong both times" if is_known else f"{len(same)} unchanged"
        return f"{better} better, {worse} worse, {stayed}"

    @property
    def order(self) -> str:
        """The order of `changes`, in words."""
        return f"the largest {'losses first, then the gains' if self.has_fallen else 'gains first, then the losses'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutOverview:
    """All of it; empty where there is no store."""

    num_rollouts: int = 0
    num_groups: int = 0
    num_sampled: int = 0  # with a token, seen by a step, not failed
    num_unscored: int = 0  # of them, those without a reward
    best: Sequence[RolloutExample] = ()
    worst: Sequence[RolloutExample] = ()
    improved: Sequence[PromptPair] = ()
    worsened: Sequence[PromptPair] = ()
    errors: Sequence[tuple[str, int]] = ()  # message, of how many failed rollouts; the most frequent first
    notes: Sequence[str] = ()
    held_out: BeforeAfter | None = None
    before_after: Sequence[PromptPair] = ()  # of `held_out`, those that the report shows


def read_rollouts(run_dir: RunDir) -> RolloutOverview:
    """Look through the stores of a run. What keeps them from being read is a note, not an error."""
    found = RolloutOverview()
    try:
        if run_dir.rollouts.is_dir():
            with RolloutTable.open(run_dir.rollouts) as table:
                found = _read(table)
        else:
            found = RolloutOverview(notes=(f"There are no rollouts: {run_dir.rollouts.name}/ is missing.",))
        held_out, before_after = _read_held_out(run_dir)
    except (RunError, OSError, duckdb.Error) as error:
        return replace(found, notes=(*found.notes, f"The rollouts cannot be read: {error}"))
    return replace(found, held_out=held_out, before_after=before_after)


def _read_held_out(run_dir: RunDir) -> tuple[BeforeAfter | None, list[PromptPair]]:
    steps = run_dir.evaluation_steps()
    if len(steps) < 2:
        return None, []
    with (
        RolloutTable.open(run_dir.evaluation(steps[0])) as first,
        RolloutTable.open(run_dir.evaluation(steps[-1])) as last,
    ):
        found = before_and_after(first, last, steps[0], steps[-1])
        return found, [change_of(first, last, each) for each in found.changes[:_NUM_HELD_OUT]]


def before_and_after(first: RolloutTable, last: RolloutTable, first_step: int, last_step: int) -> BeforeAfter:
    """The prompts that both evaluations have (a group's id is the place in the data) and scored."""

    def scored(table: RolloutTable) -> dict[tuple[int, str], GroupSummary]:
        groups = table.group_page(EVERYTHING, sort="seq", limit=_MAX_HELD_OUT)
        return {(each.group_id, each.prompt_hash): each for each in groups if each.reward_mean is not None}

    before, after = scored(first), scored(last)
    changes = [
        PromptChange(
            prompt_hash=key[1],
            num_groups=2,
            change=(after[key].reward_mean or 0.0) - (each.reward_mean or 0.0),
            first=each,
            last=after[key],
        )
        for key, each in before.items()
        if key in after
    ]
    found = BeforeAfter(first_step=first_step, last_step=last_step, changes=changes)
    has_fallen = found.has_fallen
    # what went as the whole did, the largest change first; then what did the opposite; then what stayed
    changes.sort(
        key=lambda each: (each.change == 0.0, (each.change < 0.0) != has_fallen, -abs(each.change), each.first.group_id)
    )
    return found


def store_evidence(table: RolloutTable) -> dict[str, Any]:
    """What the findings need of a store."""
    counts = table.count()
    return {
        "num_rollouts": counts.rollouts,
        "num_groups": counts.groups,
        "num_sampled": table.count(parse_query(_SAMPLED)).rollouts,
        "num_unscored": table.count(parse_query(f"{_SAMPLED} and unscored")).rollouts,
        "errors": _errors(table.facets("error", parse_query("status = 'failed'"), limit=_MAX_LISTED)),
    }


def _read(table: RolloutTable) -> RolloutOverview:
    known = store_evidence(table)
    if known["num_rollouts"] == 0:
        return RolloutOverview(notes=tuple(table.notes) or ("There are no rollouts: none was stored yet.",))
    extremes = table.extremes(EVERYTHING, _NUM_EXTREMES)
    return RolloutOverview(
        **known,
        best=[RolloutExample(*table.rollout(each.rollout_id)) for each in extremes.best],
        worst=[RolloutExample(*table.rollout(each.rollout_id)) for each in extremes.worst],
        improved=[change_of(table, table, each) for each in extremes.improved],
        worsened=[change_of(table, table, each) for each in extremes.worsened],
        notes=tuple(table.notes),
    )


def _errors(found: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    counts: dict[str, int] = {}
    for message, count in found:  # two long messages may begin and end alike
        short = both_ends(" ".join(message.split()), _MAX_ERROR)
        counts[short] = counts.get(short, 0) + count
    return sorted(counts.items(), key=lambda item: -item[1])


def change_of(first: RolloutTable, last: RolloutTable, change: PromptChange) -> PromptPair:
    """The pair of a change, with texts. `first`, `last`: the stores of its two groups."""
    before, after = change.first.reward_mean or 0.0, change.last.reward_mean or 0.0
    return PromptPair(
        first_reward=before,
        last_reward=after,
        first=_typical(first.group_at(change.first.seq), before),
        last=_typical(last.group_at(change.last.seq), after),
    )


def _typical(group: GroupRow, mean: float) -> RolloutExample:
    """The scored rollout whose reward is next to the mean of its group."""

    def distance(rollout: RolloutRow) -> float:
        return float("inf") if rollout.reward is None else abs(rollout.reward - mean)

    return RolloutExample(group, min(group.rollouts, key=distance))
