"""What the comparison with TRL (test_equality_with_trl) does not show: numbers by hand, rewards without a signal, and what the
config makes of groups and of whole steps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from grpo_async.config.sections import AdvantageSection
from grpo_async.errors import RunError
from grpo_async.records import RolloutGroup, ScoredGroup
from grpo_async.rewards import RewardFunction
from grpo_async.scoring.advantages import group_advantages, has_zero_variance, maxrl_advantages, whitened_advantages
from grpo_async.scoring.scorer import Scorer
from tests.support.records import make_completion, make_prompt


@pytest.mark.parametrize("scale", ["group", "none"])
@pytest.mark.parametrize(
    "rewards",
    [
        [],
        [1.0, None],
        [1.0, 1.0],
        [0.1 + 0.2, 0.3, 0.3],  # 0.30000000000000004 and 0.3
        [1e9, 1e9 + 1e-4],  # noise relative to the size
        [-1e-13, 1e-13],  # noise around 0
    ],
)
def test_equal_rewards_give_exactly_zero(rewards: list[float | None], scale: str) -> None:
    assert group_advantages(rewards, scale=scale) == [0.0] * len(rewards)  # type: ignore[arg-type]
    assert has_zero_variance(rewards)


def test_small_real_differences_are_kept() -> None:
    # 0 and 1e-6: mean 5e-7, std = 1e-6 / sqrt(2) = 7.0711e-7; 5e-7 / (7.0711e-7 + 1e-4) = 0.0049649
    assert group_advantages([0.0, 1e-6]) == pytest.approx([-0.0049649, 0.0049649], rel=1e-4)
    assert not has_zero_variance([0.0, 1e-6])


def test_maxrl_divides_by_the_mean_and_takes_no_negative_rewards() -> None:
    assert maxrl_advantages([1.0, 0.0, None, 0.0, 0.0]) == [3.0, -1.0, 0.0, -1.0, -1.0]
    assert maxrl_advantages([1.0, 1.0]) == [0.0, 0.0]
    with pytest.raises(RunError, match=r"maxrl.*-0\.5"):
        maxrl_advantages([1.0, -0.5])


def test_reinforce_plus_plus_whitens_over_the_tokens_of_the_step() -> None:
    """By the formula, on one value for each token."""
    chance = random.Random(0)
    groups = [[chance.gauss(0.0, 3.0) for _ in range(4)] for _ in range(5)] + [[2.0] * 4]
    tokens = [[chance.randrange(1, 9) for _ in rewards] for rewards in groups]
    centered = [torch.tensor(rewards) - sum(rewards) / 4 for rewards in groups]
    of_tokens = torch.cat([c.repeat_interleave(torch.tensor(t)) for c, t in zip(centered, tokens, strict=True)])
    wanted = [(c - of_tokens.mean()) / (of_tokens.var() + 1e-8).sqrt() for c in centered]
    found = whitened_advantages(groups, tokens)
    torch.testing.assert_close(torch.tensor(found[:-1]), torch.stack(wanted[:-1]), rtol=1e-5, atol=1e-6)
    assert found[-1] == [0.0] * 4  # nothing to learn from it
    assert whitened_advantages([[1.0, 0.0], [3.0, 3.0]], [[1, 1], [1, 1]])[0] == pytest.approx(
        [1.22474, -1.22474], rel=1e-5
    )


# ---- by what the config says ----


Columns = Mapping[str, Sequence[float | None]]


class _Step:
    """Groups scored by functions that return the numbers of a table: {name: [of each completion]} for each group."""

    def __init__(
        self, groups: Sequence[Columns], weights: Mapping[str, float], advantage: dict[str, Any], **settings: Any
    ) -> None:
        self._tables = groups
        rewards = [RewardFunction(self._function(name), name=name, weight=weight) for name, weight in weights.items()]
        self.scorer = Scorer(
            rewards, **{"advantage": AdvantageSection(**advantage), "train_zero_variance": False, **settings}
        )
        self.scored = [asyncio.run(self._score(number)) for number in range(len(groups))]

    def _function(self, name: str) -> Any:
        def reward(completions: list[Any], number: list[int], **_: Any) -> list[float | None]:
            return list(self._tables[number[0]][name])

        return reward

    async def _score(self, number: int) -> ScoredGroup:
        count = len(next(iter(self._tables[number].values())))
        group = RolloutGroup(
            prompt=make_prompt(number, number=number),
            completions=[make_completion(f"g{number}-r{index}") for index in range(count)],
        )
        return await self.scorer.score(group)

    def final(self) -> list[list[float]]:
        """Advantages of the samples of each group, as the trainer gets them."""
        groups = self.scorer.advantages.over_step(self.scored)
        return [[sample.advantage for sample in group.samples] for group in groups]


def test_batch_divides_by_the_std_of_all_rewards_of_the_step_those_that_are_not_trained_too() -> None:
    # 1, 0, 3, 3: mean 1.75, std = sqrt((0.5625 + 3.0625 + 1.5625 + 1.5625) / 3) = 1.5; 0.5 / 1.5001 = 0.3333111
    step = _Step([{"a": [1.0, 0.0]}, {"a": [3.0, 3.0]}], {"a": 1.0}, {"type": "batch"})
    assert step.final()[0] == pytest.approx([0.3333111, -0.3333111])
    assert step.final()[1] == []  # no signal of its own


def test_normalize_each_has_a_signal_where_the_sum_has_none_and_none_where_weights_are_zero() -> None:
    crossed = {"a": [1.0, 0.0, 0.5], "b": [0.0, 1.0, 0.5]}
    step = _Step([crossed], {"a": 2.0, "b": 1.0}, {"rewards": "normalize_each"})
    assert [len(group) for group in step.final()] == [3]
    assert _Step([crossed], {"a": 1.0, "b": 1.0}, {}).final() == [[]]  # 1, 1, 1
    constant = {"a": [1.0, 1.0], "b": [0.0, 1.0]}
    assert _Step([constant], {"a": 1.0, "b": 0.0}, {"rewards": "normalize_each"}).final() == [[]]
