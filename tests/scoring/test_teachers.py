"""On-policy distillation: who scores which tokens, and what a run is shown of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from grpo_async.batching.pack import split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.config.sections import AdvantageSection, DistillationSection
from grpo_async.records import Prompt, RolloutGroup, ScoredGroup
from grpo_async.rewards import RewardFunction
from grpo_async.rewards.served_model import ServedModelError
from grpo_async.scoring.scorer import Scorer
from grpo_async.scoring.teachers import Teachers
from tests.rewards.reward_server import RewardServer, reward_server
from tests.support.records import make_completion, make_prompt

HINTED = {"policy": {"prompt_column": "hint"}}


async def _minus_ids(token_ids: Sequence[int]) -> Sequence[float]:
    """A policy whose log-probability of a token is minus its id; less 100 after the token 99, which only a hint has."""
    return [-float(token) - 100.0 * (99 in token_ids) for token in token_ids[1:]]


def _score(section: dict[str, Any], *functions: Any, **columns: Any) -> ScoredGroup:
    scorer = Scorer(
        [RewardFunction(function) for function in functions],
        advantage=AdvantageSection(type="none"),
        train_zero_variance=False,
        is_taught=True,
    )

    def hinted(prompt: Prompt, hint: Any) -> list[int]:
        assert prompt.columns["hint"] == hint
        return [99, 98, 97]

    scorer.teachers = Teachers(DistillationSection(**section), own=_minus_ids, teacher_prompt_ids=hinted)
    completions = [make_completion("r0", ids=[5, 6]), make_completion("r1", ids=[7])]
    group = RolloutGroup(prompt=make_prompt(3, hint="7!", **columns), completions=completions)
    return asyncio.run(scorer.score(group))


def test_a_teacher_sees_its_own_prompt_and_the_completion_of_the_policy() -> None:
    """The sampler's log-probabilities are -0.5: the reverse KL divergence of r1 is -0.5 + 107 a token."""
    scored = _score({"teachers": HINTED})
    assert [each.teacher_logprobs.tolist() for each in scored.samples] == [
        [0.0, 0.0, -105.0, -106.0],
        [0.0, 0.0, -107.0],
    ]
    assert [each.teacher_weight for each in scored.samples] == [1.0, 1.0]
    assert scored.rewards == pytest.approx([-105.0, -106.5])  # what a run without rewards is judged by
    assert [each.advantage for each in scored.samples] == [0.0, 0.0]  # but not what its tokens learn from


def test_beside_rewards_it_is_shown_and_does_not_count_twice_and_every_group_teaches() -> None:
    def equal(completions: list[Any]) -> list[float]:
        return [3.0] * len(completions)

    scored = _score({"teachers": HINTED}, equal)
    assert scored.rewards == [3.0, 3.0]
    assert [parts["distillation"] for parts in scored.reward_parts] == pytest.approx([-105.0, -106.5])
    assert len(scored.samples) == 2


def test_several_teachers_are_added_by_weight_or_chosen_by_the_row(server: RewardServer) -> None:
    teachers = {
        "policy": {**HINTED["policy"], "weight": 2.0},
        "served": {"url": server.url, "weight": 0.5, "served_model_name": "large"},
    }
    together = _score({"teachers": teachers}).samples[1]
    assert (together.teacher_logprobs.tolist(), together.teacher_weight) == ([0.0, 0.0, -214.0 - 3.5], 2.5)
    assert server.bodies[-1]["model"] == "large"
    (alone, _) = _score({"teachers": teachers, "teacher_column": "who"}, who="served").samples
    assert (alone.teacher_logprobs.tolist(), alone.teacher_weight) == ([0.0, 0.0, -2.5, -3.0], 0.5)


def test_what_a_served_teacher_cannot_say_fails_the_group_with_its_address(server: RewardServer) -> None:
    for answer in ({"choices": []}, {"choices": [{"prompt_logprobs": [None, {"1": {"logprob": -1.0}}]}]}):
        server.otherwise = lambda body, answer=answer: answer
        with pytest.raises(ServedModelError, match=server.url):
            _score({"teachers": {"served": {"url": server.url}}})


def test_tokens_keep_their_teachers_on_the_way_to_a_rank() -> None:
    samples = _score({"teachers": HINTED}).samples
    plan = plan_batch([len(each.token_ids) for each in samples], world_size=1, micro_batch_tokens=9, pack=True)
    (batch,) = split_by_rank(samples, [1.0, 1.0], plan, trainer_version=0)[0].pack()
    assert batch.teacher_logprobs is not None
    assert dict(zip(batch.target_ids.tolist(), batch.teacher_logprobs.tolist(), strict=True)) == {
        5: -105.0, 6: -106.0, 7: -107.0,
    }  # fmt: skip
    part = batch.of_tokens(slice(1, 3))
    assert part.teacher_logprobs is not None
    assert part.teacher_weights is not None
    assert part.teacher_logprobs.tolist() == batch.teacher_logprobs.tolist()[1:]
    assert part.teacher_weights.tolist() == [1.0, 1.0]


@pytest.fixture
def server() -> Any:
    def minus_ids(body: dict[str, Any]) -> Any:
        entries = [{str(token): {"logprob": -float(token), "rank": 1}} for token in body["prompt"][1:]]
        return {"choices": [{"prompt_logprobs": [None, *entries]}]}

    with reward_server() as server:
        server.otherwise = minus_ids
        yield server
