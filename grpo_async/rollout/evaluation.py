"""Greedy evaluation on held-out prompts, through the same server and the same reward functions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

from grpo_async.chat.renderer import ChatRenderer
from grpo_async.errors import DeadlineError
from grpo_async.records import Prompt, RolloutGroup
from grpo_async.rewards import RewardFunction
from grpo_async.rollout.conversation import Conversation
from grpo_async.scoring.advantages import combine_rewards
from grpo_async.scoring.scorer import Scorer


class Evaluator:
    """Generates one completion per prompt with `conversation` (which carries temperature 0) and scores it."""

    def __init__(
        self,
        prompts: Sequence[Prompt],
        conversation: Conversation,
        renderer: ChatRenderer,
        scorer: Scorer,
        rewards: Sequence[RewardFunction],
        *,
        max_in_flight: int,
        rollout_timeout_s: float,
    ) -> None:
        self._prompts = prompts
        self._conversation = conversation
        self._renderer = renderer
        self._scorer = scorer
        self._weights = {reward.name: reward.weight for reward in rewards}
        self._max_in_flight = max_in_flight
        self._rollout_timeout_s = rollout_timeout_s

    async def run(self, *, version: int) -> dict[str, float]:
        """Metrics of policy `version`: reward, rewards/{name}, mean_length, truncated, num_prompts.

        Raises:
            GrpoAsyncError: a request or a reward failed; an evaluation over part of the prompts would not compare.
        """
        slots = asyncio.Semaphore(self._max_in_flight)

        async def one(number: int, prompt: Prompt) -> tuple[dict[str, float | None], int, bool]:
            name = f"eval-v{version}-{number}"
            async with slots:
                try:
                    async with asyncio.timeout(self._rollout_timeout_s):
                        completion = await self._conversation.run(
                            name, self._renderer.prompt_ids(prompt), seed=number, cache_salt=str(version)
                        )
                except TimeoutError as error:
                    raise DeadlineError(
                        f"completion {name} of the evaluation",
                        waited_s=self._rollout_timeout_s,
                        setting="rollout.rollout_timeout_s",
                    ) from error
            group = RolloutGroup(group_id=-1, prompt=prompt, completions=[completion])
            (parts,), _ = await self._scorer.reward_parts(group, [completion])
            return parts, completion.num_sampled_tokens, completion.truncated

        results = await asyncio.gather(*(one(number, prompt) for number, prompt in enumerate(self._prompts)))
        parts = [result[0] for result in results]
        metrics = {"num_prompts": float(len(results))}
        scored = [reward for reward in combine_rewards(parts, self._weights) if reward is not None]
        if scored:
            metrics["reward"] = sum(scored) / len(scored)
        for name in self._weights:
            values = [value for part in parts if (value := part[name]) is not None]
            if values:
                metrics[f"rewards/{name}"] = sum(values) / len(values)
        metrics["mean_length"] = sum(result[1] for result in results) / len(results)
        metrics["truncated"] = sum(result[2] for result in results) / len(results)
        return metrics


def majority_share(rows: Sequence[dict[str, Any]], column: str) -> float:
    """Share of the most frequent value: answers [3, 3, 5] -> 2/3, what always answering 3 would score."""
    counts = Counter(str(row[column]) for row in rows)
    return counts.most_common(1)[0][1] / len(rows)
