"""The held-out prompts in two evaluations of a run: which got better, which worse, and what was answered."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.store.query import EVERYTHING
from grpo_async.store.rows import GroupRow, RolloutRow
from grpo_async.store.summaries import GroupSummary, PromptChange
from grpo_async.store.table import RolloutTable
from grpo_async.utils.text import both_ends, count
from grpo_async.viewer.format import conversation, prompt_of
from grpo_async.viewer.web.sources import Source

_MAX_TEXT = 6_000  # characters of a prompt or a completion; more is cut in the middle
_MAX_COLUMN = 200  # of a column of the data
_MAX_HELD_OUT = 10_000  # groups of an evaluation that are compared


@dataclass(frozen=True, slots=True, kw_only=True)
class BeforeAfter:
    """The held-out prompts in two evaluations. `changes`: what changed most comes first, the gains before the losses, or where the
    mean fell the losses before the gains."""

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


def compare(first: RolloutTable, last: RolloutTable) -> BeforeAfter:
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
    found = BeforeAfter(changes=changes)
    has_fallen = found.has_fallen
    # what went as the whole did, the largest change first; then what did the opposite; then what stayed
    changes.sort(
        key=lambda each: (each.change == 0.0, (each.change < 0.0) != has_fallen, -abs(each.change), each.first.group_id)
    )
    return found


def before_after(source: Source, first: int, last: int, offset: int, limit: int) -> dict[str, Any]:
    """The same held-out prompts in two evaluations, what changed most first.

    Args:
        first, last: steps; -1: the first evaluation, and the last.

    Raises:
        NotFoundError: there is no evaluation of that step.
    """
    steps = source.run.evaluation_steps()
    if len(steps) < 2:
        return {"steps": steps, "rows": []}
    asked = (steps[0] if first < 0 else first, steps[-1] if last < 0 else last)
    evaluations = [source.find(f"{source.name}@{step}") for step in asked]
    found = compare(*(each.table() for each in evaluations))
    rows = []
    for change in found.changes[offset : offset + limit]:
        summaries = (change.first, change.last)
        sides = [_typical(each.table(), summary) for each, summary in zip(evaluations, summaries, strict=True)]
        group, rollout = sides[-1]
        columns = {name: _shortened(value) for name, value in group.columns.items()}
        prompt = both_ends(conversation(prompt_of(group, rollout)), _MAX_TEXT)
        shown = [_side(source.name, *side) for side in zip(asked, sides, strict=True)]
        rows.append({"prompt": prompt, "columns": columns, "sides": shown})
    return {
        "steps": steps,
        "asked": asked,
        "total": len(found.changes),
        "outcome": f"{count(len(found.changes), 'held-out prompt')}: {found.outcome}",
        "order": found.order,
        "rows": rows,
    }


def _typical(table: RolloutTable, summary: GroupSummary) -> tuple[GroupRow, RolloutRow]:
    """The group, and its scored rollout whose reward is next to the mean."""
    group, mean = table.group_at(summary.seq), summary.reward_mean or 0.0

    def distance(rollout: RolloutRow) -> float:
        return float("inf") if rollout.reward is None else abs(rollout.reward - mean)

    return group, min(group.rollouts, key=distance)


def _side(run: str, step: int, example: tuple[GroupRow, RolloutRow]) -> dict[str, Any]:
    group, rollout = example
    return {
        "run": f"{run}@{step}",
        "step": step,
        "seq": group.seq,
        "id": rollout.rollout_id,
        "reward": rollout.reward,
        "status": rollout.status,
        "num_tokens": rollout.num_tokens,
        "text": both_ends(conversation(rollout.messages), _MAX_TEXT),
    }


def _shortened(value: object) -> str:
    """A column of the data, as JSON where it is not text: the tests of a programming problem may be long."""
    return both_ends(
        value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str), _MAX_COLUMN
    )
