"""Which groups are shown, and in which order. Pure functions over rows; only summaries are kept in memory.

scan_groups -> Filters.accept -> summarise -> order
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from grpo_async.errors import ConfigError
from grpo_async.records import GroupStatus
from grpo_async.store import GroupRow, StoredGroup

SortKey = Literal["step", "reward", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSummary:
    """What the table shows of one group, and where its row stands in the store.

    Rewards are over the scored rollouts (None: none was scored); `mean_length` is in sampled tokens per rollout;
    `versions` are the oldest and newest policy that sampled a token.
    """

    group_id: int
    step: int | None
    status: GroupStatus
    prompt: str
    num_rollouts: int
    reward_mean: float | None
    reward_min: float | None
    reward_max: float | None
    mean_length: float
    versions: tuple[int, int] | None
    truncated_share: float
    part: Path
    offset: int

    def figures(self) -> dict[str, Any]:
        """The computed numbers, for `--json`."""
        hidden = ("part", "offset", "prompt", "group_id", "step", "status")
        return {key: value for key, value in asdict(self).items() if key not in hidden}


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """What a group must satisfy; a field that is None (or empty) asks nothing."""

    steps: tuple[int, int | None] | None = None  # first and last, inclusive; last None = no end
    statuses: frozenset[GroupStatus] = frozenset()
    min_reward: float | None = None  # of the group's mean
    max_reward: float | None = None
    truncated: bool | None = None  # True: some rollout was cut; False: none was
    search: str | None = None  # in prompt or completions, any case
    group_id: int | None = None
    rollout_id: str | None = None

    def accept(self, row: GroupRow) -> bool:
        return (
            (self.group_id is None or row.group_id == self.group_id)
            and (self.rollout_id is None or any(rollout.rollout_id == self.rollout_id for rollout in row.rollouts))
            and (not self.statuses or row.status in self.statuses)
            and self._accept_step(row.step)
            and self._accept_reward(row)
            and (self.truncated is None or any(rollout.truncated for rollout in row.rollouts) == self.truncated)
            and (self.search is None or _contains(row, self.search.lower()))
        )

    def _accept_step(self, step: int | None) -> bool:
        if self.steps is None:
            return True
        first, last = self.steps
        return step is not None and first <= step and (last is None or step <= last)

    def _accept_reward(self, row: GroupRow) -> bool:
        if self.min_reward is None and self.max_reward is None:
            return True
        rewards = _rewards(row)
        if not rewards:
            return False
        mean = fmean(rewards)
        return (self.min_reward is None or mean >= self.min_reward) and (
            self.max_reward is None or mean <= self.max_reward
        )


def parse_steps(text: str) -> tuple[int, int | None]:
    """'3' -> (3, 3); '3..5' -> (3, 5); '3..' -> (3, None); '..5' -> (0, 5)."""
    first, dots, last = (part.strip() for part in text.partition(".."))
    try:
        if not dots:
            return int(first), int(first)
        steps = (int(first) if first else 0), (int(last) if last else None)
    except ValueError:
        raise ConfigError(f"--step {text}: write a step (12), or a range (10..20, 10.., ..20)") from None
    if steps[1] is not None and steps[1] < steps[0]:
        raise ConfigError(f"--step {text}: the range ends before it begins")
    return steps


def parse_statuses(text: str) -> frozenset[GroupStatus]:
    """'trained,stale' -> both statuses."""
    words = [word.strip() for word in text.split(",")]
    known = [status.value for status in GroupStatus]
    unknown = [word for word in words if word not in known]
    if unknown:
        raise ConfigError(f"--status {text}: {unknown[0]!r} is not a status; the statuses are {', '.join(known)}")
    return frozenset(GroupStatus(word) for word in words)


def select(groups: Iterable[StoredGroup], filters: Filters) -> tuple[list[GroupSummary], int]:
    """Summaries of the accepted groups in the order of writing, and how many groups were read."""
    found, num_read = [], 0
    for stored in groups:
        num_read += 1
        if filters.accept(stored.row):
            found.append(summarise(stored))
    return found, num_read


def order(summaries: list[GroupSummary], key: SortKey | None) -> list[GroupSummary]:
    """The most interesting first: newest step, highest mean reward, longest; without a key, what was written last."""
    newest_first = summaries[::-1]
    if key is None:
        return newest_first
    return sorted(newest_first, key=lambda summary: _sort_value(summary, key), reverse=True)


def _sort_value(summary: GroupSummary, key: SortKey) -> float:
    value = {"step": summary.step, "reward": summary.reward_mean, "length": summary.mean_length}[key]
    return float("-inf") if value is None else float(value)


def summarise(stored: StoredGroup) -> GroupSummary:
    row = stored.row
    rewards, rollouts = _rewards(row), row.rollouts
    versions = {version for rollout in rollouts for version in rollout.sampled_versions}
    return GroupSummary(
        group_id=row.group_id,
        step=row.step,
        status=row.status,
        prompt=next((m.content for m in reversed(row.messages) if m.role == "user"), _last_text(row)),
        num_rollouts=len(rollouts),
        reward_mean=fmean(rewards) if rewards else None,
        reward_min=min(rewards, default=None),
        reward_max=max(rewards, default=None),
        mean_length=fmean(rollout.num_tokens for rollout in rollouts) if rollouts else 0.0,
        versions=(min(versions), max(versions)) if versions else None,
        truncated_share=fmean(rollout.truncated for rollout in rollouts) if rollouts else 0.0,
        part=stored.part,
        offset=stored.offset,
    )


def _last_text(row: GroupRow) -> str:
    return row.messages[-1].content if row.messages else ""


def _rewards(row: GroupRow) -> list[float]:
    return [rollout.reward for rollout in row.rollouts if rollout.reward is not None]


def _contains(row: GroupRow, text: str) -> bool:
    messages = [*row.messages, *(message for rollout in row.rollouts for message in rollout.messages)]
    return any(text in message.content.lower() for message in messages)
