"""What scoring hands to reward functions and what it makes of their answers."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from grpo_async.config.loss_sections import AdvantageSection
from grpo_async.records import RolloutCompletion, RolloutGroup, ScoredGroup
from grpo_async.rewards import RewardError, RewardFunction
from grpo_async.scoring.scorer import Scorer
from tests.support.records import make_completion, make_prompt


def _score(
    completions: Sequence[RolloutCompletion],
    *rewards: RewardFunction,
    environment_weights: Mapping[str, float] | None = None,
    **columns: Any,
) -> ScoredGroup:
    scorer = Scorer(
        rewards, advantage=AdvantageSection(), train_zero_variance=False, environment_weights=environment_weights
    )
    group = RolloutGroup(group_id=0, prompt=make_prompt(**columns), completions=completions)
    return asyncio.run(scorer.score(group))


def _zero(completions: list[Any]) -> list[float]:
    return [0.0] * len(completions)


def test_a_reward_that_raises_is_told_with_its_file_and_line() -> None:
    def broken(completions: list[Any]) -> list[float]:
        raise KeyError("answer")

    with pytest.raises(RewardError) as caught:
        _score([make_completion("r0")], RewardFunction(broken), RewardFunction(_zero, name="zero"))
    assert isinstance(caught.value.__cause__, KeyError)
    assert f'{__file__}", line' in "".join(traceback.format_exception(caught.value))


def test_environment_rewards_stand_beside_the_functions_and_count_by_their_weight() -> None:
    """R1.13: environment rewards reach the reward columns. 0 + 2 x 3 = 6, 0 + 2 x 1 = 2; no reward of it: 0 alone."""
    completions = [
        replace(make_completion(f"r{index}"), environment_rewards={"Game": reward})
        for index, reward in enumerate([3.0, 1.0, None])
    ]
    scored = _score(completions, RewardFunction(_zero, name="zero"), environment_weights={"Game": 2.0})
    assert scored.reward_parts == [
        {"zero": 0.0, "Game": 3.0}, {"zero": 0.0, "Game": 1.0}, {"zero": 0.0, "Game": None},
    ]  # fmt: skip
    assert scored.rewards == [6.0, 2.0, 0.0]
    assert [sample.rewards["Game"] for sample in scored.samples] == [3.0, 1.0, None]


def test_an_environments_reward_is_enough_without_any_function() -> None:
    """R1.13: rewards 1 and 0: mean 0.5, sample std 0.7071, advantages +-0.707."""
    completions = [
        replace(make_completion(f"r{index}"), environment_rewards={"Game": float(index)}) for index in range(2)
    ]
    scored = _score(completions, environment_weights={"Game": 1.0})
    assert [sample.advantage for sample in scored.samples] == pytest.approx([-0.707, 0.707], abs=1e-3)


def test_only_survivors_are_scored_and_every_column_is_theirs() -> None:
    """R6.6: of four rollouts the second failed: three entries in every list, none of them the second's."""
    completions = [
        replace(make_completion(f"r{index}", ids=[10 + index], failed=index == 1), reward_columns={"seat": index})
        for index in range(4)
    ]
    seen: dict[str, Any] = {}

    def judge(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], answer: list[str], seat: list[int]
    ) -> list[float]:
        seen.update(prompts=len(prompts), completions=len(completions), ids=completion_ids, answer=answer, seat=seat)
        return [float(ids[0]) for ids in completion_ids]

    scored = _score(completions, RewardFunction(judge), answer="7")
    assert seen == {
        "prompts": 3, "completions": 3, "ids": [[10], [12], [13]], "answer": ["7"] * 3, "seat": [0, 2, 3],
    }  # fmt: skip
    assert scored.rewards == [10.0, 12.0, 13.0]
    assert [sample.rollout_id for sample in scored.samples] == ["r0", "r2", "r3"]
