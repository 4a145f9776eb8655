"""Greedy evaluation on held-out prompts, through the same server and the same reward functions."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from grpo_async.errors import RunError
from grpo_async.records import Prompt, RolloutCompletion, RolloutStatus
from grpo_async.rollout.producer import GroupProducer, GroupRequest
from grpo_async.rollout.seeds import seed_of
from grpo_async.scoring.advantages import combine_rewards
from grpo_async.scoring.scorer import Scorer

_MAX_FAILED_SHARE = 0.05


class Evaluator:
    """Makes one completion per prompt with `producer` (which samples with temperature 0) and scores it."""

    def __init__(
        self, prompts: Sequence[Prompt], producer: GroupProducer, scorer: Scorer, *, max_in_flight: int
    ) -> None:
        """`max_in_flight` bounds the environments that are leased at once."""
        self._prompts = prompts
        self._max_in_flight = max_in_flight
        self._producer = producer
        self._scorer = scorer

    async def run(self, *, version: int) -> dict[str, float]:
        """Metrics of policy `version`: reward, rewards/{name}, mean_length, num_turns, truncated, num_prompts, and num_failed
        and num_unscored where there are any (a rollout without tokens is not scored, as in training).

        Raises:
            GrpoAsyncError: a reward failed, or more than 5% of the rollouts did: the rest would not compare.
        """
        slots = asyncio.Semaphore(self._max_in_flight)

        async def one(number: int, prompt: Prompt) -> tuple[dict[str, float | None], RolloutCompletion]:
            request = GroupRequest(
                name=f"eval-v{version}-{number}",
                prompt=prompt,
                size=1,
                seed=seed_of("evaluation", number),
                served_version=lambda: version,
            )
            async with slots, self._producer.produce(request) as produced:  # waits: for rollouts with limits
                (completion,) = produced.completions
                if not completion.status.is_trainable or not completion.num_sampled_tokens:
                    return dict.fromkeys(self._scorer.weights), completion
                scores = await self._scorer.scores(prompt, [completion], environments=produced.environments)
            return scores.parts[0], completion

        try:
            async with asyncio.TaskGroup() as tasks:
                running = [tasks.create_task(one(number, prompt)) for number, prompt in enumerate(self._prompts)]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        results = [task.result() for task in running]
        failed = [completion for _, completion in results if completion.status is RolloutStatus.FAILED]
        if len(failed) > _MAX_FAILED_SHARE * len(results):
            raise RunError(
                f"{len(failed)} of {len(results)} rollouts of the evaluation failed; the first, {failed[0].rollout_id}: "
                f"{failed[0].error}"
            )
        parts = [part for part, _ in results]
        completions = [completion for _, completion in results if completion.num_sampled_tokens]
        metrics = {"num_prompts": float(len(parts))}
        scored = [reward for reward in combine_rewards(parts, self._scorer.weights) if reward is not None]
        if scored:
            metrics["reward"] = fmean(scored)
        for name in self._scorer.weights:
            values = [value for part in parts if (value := part[name]) is not None]
            if values:
                metrics[f"rewards/{name}"] = fmean(values)
        if completions:
            metrics["mean_length"] = fmean(completion.num_sampled_tokens for completion in completions)
            metrics["num_turns"] = fmean(len(completion.turns) for completion in completions)
        metrics["truncated"] = fmean(float(completion.truncated) for _, completion in results)
        counts = {"num_failed": len(failed), "num_unscored": len(results) - len(scored) - len(failed)}
        return metrics | {name: float(count) for name, count in counts.items() if count}


def majority_share(rows: Sequence[dict[str, Any]], column: str) -> float:
    """Share of the most frequent value: answers [3, 3, 5] -> 2/3, what always answering 3 would score."""
    counts = Counter(str(row[column]) for row in rows)
    return counts.most_common(1)[0][1] / len(rows)
