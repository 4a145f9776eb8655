"""Rewards to advantages, in plain Python: a group has a handful of rewards.

None always means unscored: it is left out of every mean and standard deviation, and its advantage is 0. Every standard
deviation has ddof = 1, as in TRL. Functions that need the rewards of the whole step take one list per group.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from grpo_async.config.sections import AdvantageSection
from grpo_async.errors import RunError
from grpo_async.findings.statistics import are_equal
from grpo_async.records import RolloutSample, ScoredGroup

Value = TypeVar("Value")
Rewards = Sequence[float | None]
"""Rewards of one group, [num_completions]."""

_STD_EPSILON = 1e-4  # added to the standard deviation, as in TRL
_OVER_STEP = ("batch", "reinforce_plus_plus_baseline")


class Advantages:
    """How the rewards of a run are compared.

        of_group      when a group is scored: final unless it needs the whole step; always decides whether there is a signal
        over_step     when the groups of a step are taken: for what needs all of them (batch, reinforce_plus_plus_baseline,
                      normalize_each)

    `over_step` uses the rewards alone, never the advantages that the samples have: it may be called again."""

    def __init__(self, section: AdvantageSection, weights: Mapping[str, float]) -> None:
        self._section = section
        self._weights = weights

    def of_group(self, rewards: Rewards, parts: Sequence[Mapping[str, float | None]]) -> list[float]:
        """Advantages of one group, [num_completions], of the `rewards` summed by weight, or by function (`parts`). Those that
        `over_step` completes have the sign of the final ones. All are 0 in a group without a signal, and only there."""
        if self._section.rewards == "normalize_each":
            return [value or 0.0 for value in normalize_each(parts, self._weights)]
        match self._section.type:
            case "rloo":
                return leave_one_out_advantages(rewards)
            case "maxrl":
                return maxrl_advantages(rewards)
            case kind:
                return group_advantages(rewards, scale="group" if kind == "group" else "none")

    def of_sample(
        self,
        sample: RolloutSample,
        index: int,
        rewards: Rewards,
        parts: Sequence[Mapping[str, float | None]],
    ) -> float:
        """Advantage of a branch with its own reward: what the completion at `index` of its group would have with it."""
        return self.of_group(_with(rewards, index, sample.reward), _with(parts, index, sample.rewards))[index]

    def over_step(self, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
        """The groups of a step with their final advantages. The std is over all groups, including those without samples."""
        if self._section.rewards != "normalize_each" and self._section.type not in _OVER_STEP:
            return list(groups)
        tokens = [[rollout.num_sampled_tokens for rollout in group.group.trainable] for group in groups]
        rewards, parts = [group.rewards for group in groups], [group.reward_parts for group in groups]
        advantages = self._step_advantages(rewards, parts, tokens)
        changed = []
        for number, group in enumerate(groups):
            indices = {each.rollout_id: index for index, each in enumerate(group.group.trainable)}
            samples = []
            for sample in group.samples:
                index = indices[sample.root_id]
                advantage = advantages[number][index]
                if sample.rewards != parts[number][index]:  # a branch with its own reward
                    own_rewards = _with(rewards, number, _with(rewards[number], index, sample.reward))
                    own_parts = _with(parts, number, _with(parts[number], index, sample.rewards))
                    advantage = self._step_advantages(own_rewards, own_parts, tokens)[number][index]
                samples.append(replace(sample, advantage=advantage))
            changed.append(replace(group, samples=samples))
        return changed

    def _step_advantages(
        self,
        rewards: Sequence[Rewards],
        parts: Sequence[Sequence[Mapping[str, float | None]]],
        tokens: Sequence[Sequence[int]],
    ) -> list[list[float]]:
        if self._section.rewards == "normalize_each":
            return normalized_over_step([normalize_each(rows, self._weights) for rows in parts])
        if self._section.type == "batch":
            return batch_advantages(rewards)
        return whitened_advantages(rewards, tokens)


def _with(values: Sequence[Value], index: int, value: Value) -> list[Value]:
    return [*values[:index], value, *values[index + 1 :]]


def combine_rewards(rows: Sequence[Mapping[str, float | None]], weights: Mapping[str, float]) -> list[float | None]:
    """One reward per row: r = sum over the functions that scored the row of weight x value (TRL's weighted nansum).

    Weights {a: 1, b: 0.5}: {a: 1, b: 0.4} -> 1.2; {a: None, b: 0.4} -> 0.2; {a: None, b: None} -> None."""
    return [_weighted_sum(row, weights) for row in rows]


def group_advantages(rewards: Rewards, *, scale: Literal["group", "none"] = "group") -> list[float]:
    """Advantages of one group (GRPO, arXiv 2402.03300), over its scored rewards:

        group    A = (r - mean) / (std + 1e-4)
        none     A = r - mean                   (Dr. GRPO, arXiv 2503.20783)

    Unscored rewards and groups with fewer than two scored ones get 0. So do rewards that are equal but for float noise:
    divided by a tiny std it would become advantages of up to +-1, and 0.1 + 0.2 would win over 0.3.

    Example: [1, 0, None, 1, 0]: mean 0.5, std = sqrt(4 x 0.25 / 3) = 0.57735, A = +-0.5 / 0.57745 = +-0.86588, and 0.
    """
    scored = scored_rewards(rewards)
    if has_zero_variance(rewards):
        return [0.0] * len(rewards)
    mean = math.fsum(scored) / len(scored)
    divisor = 1.0 if scale == "none" else sample_std(scored) + _STD_EPSILON
    return [0.0 if reward is None else (reward - mean) / divisor for reward in rewards]


def leave_one_out_advantages(rewards: Rewards) -> list[float]:
    """RLOO (arXiv 2402.14740): A = r - (sum - r) / (n - 1)  =  (r - mean) x n / (n - 1), over n scored rewards; 0 as in
    `group_advantages`. [1, 0, None, 0]: the others of 1 have mean 0, of a 0 have 0.5; A = 1, -0.5, 0, -0.5."""
    if has_zero_variance(rewards):
        return [0.0] * len(rewards)
    scored = scored_rewards(rewards)
    total, num_others = math.fsum(scored), len(scored) - 1
    return [0.0 if reward is None else reward - (total - reward) / num_others for reward in rewards]


def maxrl_advantages(rewards: Rewards) -> list[float]:
    """MaxRL (arXiv 2602.02710): A = (r - mean) / mean over the scored rewards of a group; 0 as in `group_advantages`. With rewards
    of 0 and 1 the mean over completions estimates the gradient of log P(success).

    [1, 0, None, 0, 0]: mean 0.25, A = 3, -1, 0, -1, -1. RunError for a negative reward."""
    if has_zero_variance(rewards):
        return [0.0] * len(rewards)
    scored = scored_rewards(rewards)
    if min(scored) < 0.0:
        raise RunError(
            f"advantage.type: maxrl divides by the mean reward of a group and needs rewards of at least 0, and one is "
            f"{min(scored):g}; change the reward, or set advantage.type: none"
        )
    mean = math.fsum(scored) / len(scored)
    return [0.0 if reward is None else (reward - mean) / mean for reward in rewards]


def whitened_advantages(groups: Sequence[Rewards], tokens: Sequence[Sequence[int]]) -> list[list[float]]:
    """REINFORCE++-baseline (arXiv 2501.03262), as in verl. c = r - mean of the group, A = (c - mean) / sqrt(var + 1e-8), both over
    the step, each completion counted once for each of its `tokens` (ddof = 1); 0 as in `group_advantages`.

    [1, 0] and [3, 3] with one token each: c = 0.5, -0.5, 0, 0; var = 1/6, A = +-0.5 / 0.40825 = +-1.22474, and 0, 0."""
    centered = [group_advantages(rewards, scale="none") for rewards in groups]
    counted = [
        (value, count)
        for rewards, values, counts in zip(groups, centered, tokens, strict=True)
        for reward, value, count in zip(rewards, values, counts, strict=True)
        if reward is not None
    ]
    total = sum(count for _, count in counted)
    if total < 2:
        return centered
    mean = math.fsum(value * count for value, count in counted) / total
    variance = math.fsum((value - mean) ** 2 * count for value, count in counted) / (total - 1)
    divisor = math.sqrt(variance + 1e-8)
    return [
        [0.0 if reward is None or has_zero_variance(rewards) else (value - mean) / divisor
         for reward, value in zip(rewards, values, strict=True)]
        for rewards, values in zip(groups, centered, strict=True)
    ]  # fmt: skip


def batch_advantages(groups: Sequence[Rewards]) -> list[list[float]]:
    """Lite PPO (arXiv 2508.08221): A = (r - mean of the group) / (std of all scored rewards of the step + 1e-4); 0 as in
    `group_advantages`.

    [1, 0] and [3, 3]: std = sqrt((0.5625 + 3.0625 + 1.5625 + 1.5625) / 3) = 1.5, so A = +-0.5 / 1.5001 = +-0.33331, and 0, 0.
    """
    divisor = sample_std([reward for rewards in groups for reward in scored_rewards(rewards)]) + _STD_EPSILON
    return [[advantage / divisor for advantage in group_advantages(rewards, scale="none")] for rewards in groups]


def normalize_each(rows: Sequence[Mapping[str, float | None]], weights: Mapping[str, float]) -> list[float | None]:
    """First half of GDPO (arXiv 2601.05242): each reward function is normalized within the group, then they are summed by weight:

        c = sum over the functions k that scored the row of weight_k x (r_k - mean_k) / (std_k + 1e-4)

    None for a row that no function scored; where the functions cancel out, all rows are 0. Weights {a: 1, b: 0.5}, rows
    {a: 1, b: 30}, {a: 0, b: 10}: columns +-0.70701 and +-0.70710, so c = +-(0.70701 + 0.35355) = +-1.06056."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    columns = {name: [row.get(name) for row in rows] for name in names}
    compared = {name: group_advantages(column) for name, column in columns.items()}
    combined = combine_rewards(
        [{name: None if row.get(name) is None else compared[name][index] for name in names} for index, row in enumerate(rows)],
        weights,
    )  # fmt: skip
    if has_zero_variance(combined):
        return [None if value is None else 0.0 for value in combined]
    return combined


def normalized_over_step(groups: Sequence[Rewards]) -> list[list[float]]:
    """Second half of GDPO (arXiv 2601.05242), over the values c of `normalize_each` of a step: A = (c - mean) / (std + 1e-4).

    [1, -1] and [0, 0]: std = sqrt(2 / 3) = 0.81650, A = +-1 / 0.81660 = +-1.22459, and 0, 0."""
    scored = [value for values in groups for value in scored_rewards(values)]
    mean = math.fsum(scored) / len(scored) if scored else 0.0
    divisor = sample_std(scored) + _STD_EPSILON
    return [
        [0.0 if value is None else (value - mean) / divisor for value in values]
        if not has_zero_variance(values)
        else [0.0] * len(values)
        for values in groups
    ]


def has_zero_variance(rewards: Rewards) -> bool:
    """Whether a group has no signal: fewer than two scored rewards, or all are equal."""
    scored = scored_rewards(rewards)
    return len(scored) < 2 or are_equal(min(scored), max(scored))


def scored_rewards(rewards: Rewards) -> list[float]:
    return [reward for reward in rewards if reward is not None]


def rewards_by_name(parts: Sequence[Mapping[str, float | None]]) -> dict[str, list[float]]:
    """The values of each reward that are not None; a reward without any is left out.

    [{"a": 1, "b": None, "c": None}, {"a": 0, "b": 2, "c": None}] -> {"a": [1, 0], "b": [2]}.
    """
    names = dict.fromkeys(name for part in parts for name in part)
    found = {name: scored_rewards([part.get(name) for part in parts]) for name in names}
    return {name: values for name, values in found.items() if values}


def sample_std(values: Sequence[float]) -> float:
    """Standard deviation with ddof = 1, the same for any order of the values; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _weighted_sum(row: Mapping[str, float | None], weights: Mapping[str, float]) -> float | None:
    terms = [weights[name] * value for name, value in row.items() if value is not None]
    return math.fsum(terms) if terms else None
