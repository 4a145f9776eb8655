"""The evaluator: over all prompts or not at all, bounded, with seeds of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from grpo_async.buffer.group import OpenGroup
from grpo_async.config.sections import AdvantageSection, EvaluationSection
from grpo_async.errors import FatalRolloutError, RunError
from grpo_async.evaluation.evaluator import EvaluationTask, Evaluator
from grpo_async.evaluation.metrics import EvaluationResult
from grpo_async.records import RolloutStatus
from grpo_async.rewards import RewardFunction
from grpo_async.scoring.scorer import Scorer
from grpo_async.store import RolloutStore
from grpo_async.utils.seeds import seed_of
from tests.support.records import make_completion, make_prompt
from tests.support.stored import LineStore, read_groups


class _Producer:
    """Completions for each prompt; notes the requests, and how many are leased at once."""

    def __init__(self, *, failing: Sequence[int] = (), broken: Exception | None = None) -> None:
        self._failing = failing
        self._broken = broken
        self._leased = 0
        self.most_leased = 0
        self.requests: list[OpenGroup] = []

    @asynccontextmanager
    async def produce(self, request: OpenGroup) -> AsyncIterator[None]:
        self.requests.append(request)
        self._leased += request.size
        self.most_leased = max(self.most_leased, self._leased)
        await asyncio.sleep(0)
        number = request.prompt.prompt_id
        if self._broken is not None and number == 2:
            raise self._broken
        completions = []
        for index in range(request.size):
            completion = make_completion(
                f"{request.name}-r{index}",
                failed=number in self._failing,
                ids=() if number == 3 else (5, 6),
                version=request.served_version(),
                text=str(number),
            )
            if number == 1:
                completion = replace(completion, status=RolloutStatus.TRUNCATED, environment_rewards={"Maze": 1.0})
            request.received(index, completion.num_sampled_tokens, 0)
            completions.append(completion)
        request.completions, request.environments = completions, [number] * request.size
        yield
        self._leased -= request.size


def _reward(completions: list[Any], environments: list[int], **_: Any) -> list[float | None]:
    number = environments[0]
    return [None if number == 0 else float(number)] * len(completions)


def _evaluator(producer: _Producer, count: int = 4, reward: Any = _reward, **settings: Any) -> Evaluator:
    scorer = Scorer(
        [RewardFunction(reward)],
        advantage=AdvantageSection(),
        train_zero_variance=False,
        environment_weights={"Maze": 2.0},
    )
    prompts = [make_prompt(number, source="odd" if number % 2 else "even") for number in range(count)]
    return Evaluator(prompts, producer, scorer, EvaluationSection(temperature=1.0, **settings))


def _run(evaluator: Evaluator, *, max_in_flight: int = 2, store: RolloutStore | None = None) -> EvaluationResult:
    task = EvaluationTask(step=5, served_version=lambda: 4, max_in_flight=max_in_flight, store=store or Mock())
    return asyncio.run(evaluator.run(task))


def test_means_are_over_the_prompts_that_have_a_reward() -> None:
    """Rewards None, 1, 2 and, without a token, none; environment None, 1.0 (weight 2), None: totals None, 3, 2."""
    producer = _Producer()
    metrics = _run(_evaluator(producer)).metrics
    assert metrics.pop("duration_s") >= 0.0
    assert metrics == {
        "num_prompts": 4.0,
        "reward": 2.5,
        "reward_std": pytest.approx(0.5**0.5),
        "reward_stderr": pytest.approx(0.5),
        "pass@1": 1.0,
        "rewards/_reward": 1.5,
        "rewards/Maze": 1.0,
        "mean_length": 2.0,
        "num_turns": 1.0,
        "truncated": 0.25,
        "num_unscored": 2.0,
        "version_min": 4.0,
        "version_max": 4.0,
        "mixed": 0.0,
    }
    assert producer.most_leased == 2


def test_seeds_are_of_prompt_and_sample_and_the_same_in_every_evaluation() -> None:
    """Not those of training: groups there have seed_of(run.seed, group)."""
    producer = _Producer()
    evaluator = _evaluator(producer, samples_per_prompt=2)
    first, second = _run(evaluator), _run(evaluator)
    seeds = [request.seed for request in producer.requests]
    assert len(set(seeds[:4])) == 4
    assert sorted(seeds[:4]) == sorted(seeds[4:])
    assert not {seed_of(0, number) for number in range(4)} & set(seeds)
    assert {**first.metrics, "duration_s": 0} == {**second.metrics, "duration_s": 0}


def test_failed_rollouts_are_counted_and_warned_about_and_end_the_evaluation_when_they_are_most(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """1 of 20 is 5%, of which nothing is said; 3 of 20 are more, and 11 more than half."""
    assert _run(_evaluator(_Producer(failing=[2]), 20)).metrics["num_failed"] == 1.0
    assert caplog.messages == []
    assert _run(_evaluator(_Producer(failing=[2, 5, 9]), 20)).metrics["num_failed"] == 3.0
    assert "3 of 20 rollouts of the evaluation failed; the first, eval-v5-2-r0: injected" in caplog.text
    with pytest.raises(
        RunError, match=r"11 of 20 rollouts of the evaluation failed; the first, eval-v5-2-r0: injected"
    ):
        _run(_evaluator(_Producer(failing=list(range(2, 13))), 20))


def test_a_reward_or_a_rollout_function_that_fails_for_one_prompt_fails_that_prompt(tmp_path: Path) -> None:
    def sometimes(completions: list[Any], environments: list[int], **_: Any) -> list[float]:
        if environments[0] == 7:
            raise KeyError("judge")
        return [1.0] * len(completions)

    with LineStore(tmp_path / "rows") as store:
        assert _run(_evaluator(_Producer(), 20, sometimes), store=store).metrics["num_failed"] == 1.0
    rows = {row.group_id: row for row in read_groups(tmp_path / "rows")}
    assert len(rows) == 20
    assert rows[7].status == "failed"
    assert {row.step for row in rows.values()} == {5}
    assert [(each.rollout_id, each.reward, each.sampled_versions) for each in rows[2].rollouts] == [
        ("eval-v5-2-r0", 1.0, {4})
    ]
    assert _run(_evaluator(_Producer(broken=ValueError("x")), 20)).metrics["num_failed"] == 1.0
    error = FatalRolloutError("no logprobs")
    error.__cause__ = cause = KeyError("logprobs")  # of the user's function, with its line
    with pytest.raises(FatalRolloutError) as caught:
        _run(_evaluator(_Producer(broken=error), 20))
    assert caught.value.__cause__ is cause
