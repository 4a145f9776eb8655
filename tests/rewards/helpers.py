"""Builders that the tests of rewards share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from grpo_async.config.sections import RewardSection
from grpo_async.rewards import RewardFunction, RewardOutcome, load_rewards
from grpo_async.rewards.call import TrainerState

TRL = "tests.rewards.trl_style_rewards"
FAULTY = "tests.rewards.faulty_rewards"


@contextmanager
def loaded(function: str, **section: Any) -> Iterator[RewardFunction]:
    """The reward that a config section names, closed at the end."""
    (reward,) = load_rewards([RewardSection(function=function, **section)])
    try:
        yield reward
    finally:
        reward.close()


async def score(
    reward: RewardFunction,
    completions: Sequence[Any],
    *,
    step: int = 0,
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> RewardOutcome:
    count = len(completions)
    return await reward.score(
        ["What is it?"] * count,
        completions,
        [[7] * (index + 1) for index in range(count)],
        columns or {},
        trainer_state=TrainerState(global_step=step, max_steps=10),
    )
