"""The reward functions of trl.rewards through our own calls: the numbers of TRL's own tests."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from grpo_async.rewards import RewardFunction

trl_rewards = pytest.importorskip("trl.rewards")

THIRD, HALF = r"\boxed{\frac{1}{3}}", r"\boxed{\frac{1}{2}}"


@pytest.mark.parametrize(
    ("function", "lengths", "gold", "expected"),
    [
        (trl_rewards.think_format_reward, [9, 9], "", [0.0, 0.0]),
        (trl_rewards.get_soft_overlong_punishment(100, 20), [110, 90], "", [-1.0, -0.5]),
        (trl_rewards.accuracy_reward, [9, 9], r"\frac{1}{3}", [1.0, 0.0]),
        (trl_rewards.accuracy_reward, [9, 9], "forty two", [None, None]),
        (trl_rewards.get_cosine_scaled_reward(max_len=100), [25, 75], r"\frac{1}{3}", [0.92678, -0.57322]),
    ],
)
def test_functions_of_trl_and_what_its_factories_make_score_as_there(
    function: Any, lengths: list[int], gold: str, expected: list[Any]
) -> None:
    reward = RewardFunction(function)
    completions = [[{"role": "assistant", "content": text}] for text in (THIRD, HALF)]
    ids = [[1] * length for length in lengths]
    try:
        outcome = asyncio.run(reward.score(["p"] * 2, completions, ids, {"solution": [gold] * 2}))
    finally:
        reward.close()
    assert outcome.values == [None if each is None else pytest.approx(each, abs=1e-5) for each in expected]
