"""Greedy evaluation: over all prompts or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from grpo_async.errors import RunError
from grpo_async.rewards import RewardFunction
from grpo_async.rollout.evaluation import Evaluator, majority_share
from grpo_async.rollout.producer import GroupRequest, Produced
from grpo_async.scoring.scorer import Scorer
from tests.support.records import make_completion, make_prompt


class _Producer:
    """One completion for each prompt; notes how many are leased at once."""

    def __init__(self, *, failing: Sequence[int] = ()) -> None:
        self._failing = failing
        self._leased = 0
        self.most_leased = 0

    @asynccontextmanager
    async def produce(self, request: GroupRequest) -> AsyncIterator[Produced]:
        self._leased += 1
        self.most_leased = max(self.most_leased, self._leased)
        await asyncio.sleep(0)
        number = request.prompt.prompt_id
        completion = make_completion(
            f"{request.name}-r0", failed=number in self._failing, ids=() if number == 3 else (5, 6)
        )
        if number == 1:
            completion = replace(completion, truncated=True, environment_rewards={"Maze": 1.0})
        yield Produced(completions=[completion], environments=[number])
        self._leased -= 1


def _evaluate(producer: _Producer, count: int = 4) -> dict[str, float]:
    def reward(completions: list[Any], environments: list[int], **_: Any) -> list[float | None]:
        (number,) = environments
        return [None if number == 0 else float(number)]

    scorer = Scorer(
        [RewardFunction(reward)], advantage_scale="group", train_zero_variance=False, environment_weights={"Maze": 2.0}
    )
    prompts = [make_prompt(number) for number in range(count)]
    return asyncio.run(Evaluator(prompts, producer, scorer, max_in_flight=2).run(version=5))


def test_means_are_over_the_prompts_that_have_a_reward() -> None:
    """Rewards None, 1, 2 and, without a token, none; environment None, 1.0 (weight 2), None: totals None, 3, 2."""
    producer = _Producer()
    metrics = _evaluate(producer)
    assert metrics == {
        "num_prompts": 4.0,
        "reward": 2.5,
        "rewards/reward": 1.5,
        "rewards/Maze": 1.0,
        "mean_length": 2.0,
        "num_turns": 1.0,
        "truncated": 0.25,
        "num_unscored": 2.0,
    }
    assert producer.most_leased == 2


def test_one_failed_rollout_of_many_is_counted_and_more_end_the_evaluation_with_the_cause() -> None:
    """1 of 20 is 5%, 2 of 20 are more."""
    assert _evaluate(_Producer(failing=[2]), 20)["num_failed"] == 1.0
    with pytest.raises(RunError, match=r"2 of 20 rollouts of the evaluation failed; the first, eval-v5-2-r0: injected"):
        _evaluate(_Producer(failing=[2, 5]), 20)


def test_the_majority_is_the_share_of_the_most_frequent_value() -> None:
    assert majority_share([{"a": 3}, {"a": "3"}, {"a": 5}], "a") == pytest.approx(2 / 3)
