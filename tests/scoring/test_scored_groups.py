"""A group to rewards and rows: who is scored with what, and who is trained."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from grpo_async.config.loss_sections import AdvantageSection
from grpo_async.records import Origin, RolloutCompletion, RolloutGroup, ScoredGroup, TaggedMessage
from grpo_async.rewards import RewardFunction
from grpo_async.scoring.scorer import Scorer
from tests.support.records import make_completion, make_prompt


def _score(
    completions: list[RolloutCompletion], function: Any, *, environments: list[Any] | None = None, **settings: Any
) -> ScoredGroup:
    scorer = Scorer(
        [RewardFunction(function)],
        **{"advantage": AdvantageSection(type="none"), "train_zero_variance": False, **settings},
    )
    group = RolloutGroup(group_id=3, prompt=make_prompt(3, "1 + 1 =", answer="2"), completions=completions)
    return asyncio.run(scorer.score(group, environments=environments))


def by_index(completions: list[Any], **_: Any) -> list[float]:
    return [float(index) for index in range(len(completions))]


def test_only_survivors_are_scored_with_columns_and_environments_of_their_own() -> None:
    """R6.6: a failed generation: survivors are scored with the reward columns trimmed to match."""
    seen: dict[str, Any] = {}

    def reward(prompts: list[Any], completions: list[Any], answer: list[str], environments: list[Any]) -> list[float]:
        seen.update(answer=answer, environments=environments, prompts=prompts)
        return [0.0, 1.0]

    completions = [make_completion("a"), make_completion("b", failed=True), make_completion("c")]
    scored = _score(completions, reward, environments=["env a", "env b", "env c"])
    assert (seen["answer"], seen["environments"], len(seen["prompts"])) == (["2", "2"], ["env a", "env c"], 2)
    assert [(sample.rollout_id, sample.advantage) for sample in scored.samples] == [("a", -0.5), ("c", 0.5)]


def test_rewards_see_the_prompt_that_the_environment_made() -> None:
    """R1.13: the text from reset() is part of the prompts that reward functions get."""
    seen: list[Any] = []

    def reward(prompts: list[Any], **_: Any) -> list[float]:
        seen.extend(prompts)
        return [0.0, 1.0]

    said = TaggedMessage(role="user", content="find the exit", origin=Origin.ENVIRONMENT)
    _score([replace(make_completion("a"), prompt_messages=[said]), make_completion("b")], reward)
    assert seen == [[{"role": "user", "content": "find the exit"}], [{"role": "user", "content": "1 + 1 ="}]]


def test_columns_of_a_rollout_function_reach_the_rewards_of_their_sample() -> None:
    """R4.3: extra keys reach rewards per sample."""

    def reward(completions: list[Any], env_reward: list[float], source: list[str], **_: Any) -> list[float]:
        assert source == ["games", "games"]
        return env_reward

    completions = [
        replace(make_completion(str(number)), reward_columns={"env_reward": number / 4, "source": "games"})
        for number in range(2)
    ]
    assert _score(completions, reward).rewards == [0.0, 0.25]


@pytest.mark.parametrize(("train_truncated", "trained"), [(True, ["a", "b", "c"]), (False, ["a", "c"])])
def test_truncated_completions_count_in_the_mean_and_are_trained_only_if_wanted(
    train_truncated: bool, trained: list[str]
) -> None:
    """rollout.overlong: rewards 0, 1, 2: mean 1 either way."""
    completions = [make_completion("a"), replace(make_completion("b"), truncated=True), make_completion("c")]
    scored = _score(completions, by_index, train_truncated=train_truncated)
    assert [sample.rollout_id for sample in scored.samples] == trained
    assert {sample.rollout_id: sample.advantage for sample in scored.samples}["c"] == 1.0
    assert scored.rewards == [0.0, 1.0, 2.0]


def test_what_functions_note_is_kept_for_the_store() -> None:
    def reward(completions: list[Any], log_extra: Any, log_metric: Any, **_: Any) -> list[float]:
        log_extra("extracted", ["4", "5"])
        log_metric("parsed", 0.5)
        return [0.0, 1.0]

    scored = _score([make_completion("a"), make_completion("b")], reward)
    assert scored.extra_columns == {"extracted": ["4", "5"]}
    assert scored.metrics["parsed"] == 0.5
    assert scored.metrics.keys() == {"parsed", "scoring/duration_s"}
