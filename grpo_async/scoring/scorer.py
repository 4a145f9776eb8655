"""Scores groups: calls the reward functions on the survivors, takes advantages within the group, makes the rows.

A failed completion is never scored and never trained; the reward columns are those of the survivors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.records import RolloutCompletion, RolloutGroup, RolloutSample, ScoredGroup
from grpo_async.rewards import RewardFunction, TrainerState
from grpo_async.scoring.advantages import combine_rewards, group_advantages, has_zero_variance


class Scorer:
    """See the module's docstring.

    Args:
        rewards: what is rewarded.
        renderer: decodes completions for the reward functions.
        advantage_scale: "group" divides by the group's standard deviation, "none" does not.
        train_zero_variance: make samples of groups whose rewards are all equal, with advantage 0.
        max_steps: optimizer steps of the run, for reward functions that ask for `trainer_state`.
    """

    def __init__(
        self,
        rewards: Sequence[RewardFunction],
        renderer: ChatRenderer,
        *,
        advantage_scale: Literal["group", "none"],
        train_zero_variance: bool,
        max_steps: int = 0,
    ) -> None:
        self._rewards = rewards
        self._renderer = renderer
        self._scale = advantage_scale
        self._train_zero_variance = train_zero_variance
        self._weights = {reward.name: reward.weight for reward in rewards}
        self._state = TrainerState(global_step=0, max_steps=max_steps)

    def set_step(self, step: int) -> None:
        """What reward functions see as `trainer_state.global_step` from now on."""
        self._state = TrainerState(global_step=step, max_steps=self._state.max_steps)

    async def score(self, group: RolloutGroup) -> ScoredGroup:
        """Score the survivors of a group (at least one).

        Raises:
            GrpoAsyncError: a reward function failed; the message names it.
        """
        survivors = group.trainable
        parts, metrics = await self.reward_parts(group, survivors)
        rewards = combine_rewards(parts, self._weights)
        advantages = group_advantages(rewards, scale=self._scale)
        has_signal = self._train_zero_variance or not has_zero_variance(rewards)
        samples = [
            _sample(group, completion, advantage=advantage, reward=reward, parts=part)
            for completion, advantage, reward, part in zip(survivors, advantages, rewards, parts, strict=True)
        ]
        return ScoredGroup(
            group=group,
            samples=samples if has_signal else [],
            rewards=rewards,
            reward_parts=parts,
            metrics=metrics,
        )

    async def reward_parts(
        self, group: RolloutGroup, completions: Sequence[RolloutCompletion]
    ) -> tuple[list[dict[str, float | None]], dict[str, float]]:
        """Every function's value for every completion, [num_completions] of {name: value}, and what they logged.

        The functions run at the same time; when one fails, the others are cancelled and its error is raised.
        """
        prompt = group.prompt
        count = len(completions)
        given = prompt.as_given()
        texts: list[Any]
        if prompt.is_conversational:
            texts = [[m.as_dict() for m in completion.completion_messages()] for completion in completions]
        else:
            texts = ["".join(m.content for m in completion.completion_messages()) for completion in completions]
        columns = {name: [value] * count for name, value in prompt.columns.items()}
        ids = [completion.completion_ids for completion in completions]
        try:
            async with asyncio.TaskGroup() as tasks:
                running = [
                    tasks.create_task(reward.score([given] * count, texts, ids, columns, trainer_state=self._state))
                    for reward in self._rewards
                ]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        outcomes = [task.result() for task in running]
        parts = [
            {reward.name: outcome.values[index] for reward, outcome in zip(self._rewards, outcomes, strict=True)}
            for index in range(count)
        ]
        return parts, {name: value for outcome in outcomes for name, value in outcome.metrics.items()}


def _sample(
    group: RolloutGroup,
    completion: RolloutCompletion,
    *,
    advantage: float,
    reward: float | None,
    parts: Mapping[str, float | None],
) -> RolloutSample:
    """One row. Prompt [1, 2], completion [3, 4], logprobs [-.5, -.1], versions [7, 7]:
    ids [1, 2, 3, 4], mask [0, 0, 1, 1], logprobs [0, 0, -.5, -.1], versions [-1, -1, 7, 7]."""
    num_prompt = len(completion.prompt_ids)
    return RolloutSample(
        group_id=group.group_id,
        rollout_id=completion.rollout_id,
        token_ids=[*completion.prompt_ids, *completion.completion_ids],
        loss_mask=[0] * num_prompt + completion.completion_mask,
        sampler_logprobs=[0.0] * num_prompt + completion.logprobs,
        policy_versions=[-1] * num_prompt + completion.versions,
        advantage=advantage,
        rewards=parts,
        reward=reward,
        truncated=completion.truncated,
    )
