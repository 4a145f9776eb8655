"""A judge that compares the completions of a group."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_async.config.sections import RewardSection
from grpo_async.rewards import RewardError, RewardOutcome, load_rewards
from tests.rewards.reward_server import RewardServer, reward_server

NAME = "grpo_async.rewards.judge:rank_group"


@pytest.fixture
def server() -> Iterator[RewardServer]:
    with reward_server() as server:
        yield server


def _says(*scores: tuple[int, float], before: str = "", after: str = "") -> Any:
    verdicts = [{"answer": number, "explanation": f"because {score}", "score": score} for number, score in scores]
    text = before + json.dumps({"scores": verdicts}) + after
    return lambda body: {"choices": [{"message": {"role": "assistant", "content": text}}]}


def _judged(
    server: RewardServer, completions: list[Any], *, prompt: Any = "2 + 2 =", **arguments: Any
) -> RewardOutcome:
    section = RewardSection(function=NAME, arguments={"url": f"{server.url}/v1", "model": "judge", **arguments})
    (reward,) = load_rewards([section])
    ids = [[1]] * len(completions)
    return asyncio.run(reward.score([prompt] * len(completions), completions, ids, {}))


def test_scores_come_in_the_order_of_the_completions_with_the_words_of_the_judge(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "secret")
    server.otherwise = _says((2, 0.9), (1, 0.1), before="<think>{1} is wrong</think>```json\n", after="\n```")
    outcome = _judged(server, ["5", "4"], token_env="JUDGE_TOKEN", extra_body={"max_tokens": 99}, rubric="Be strict.")
    assert outcome.values == [0.1, 0.9]
    assert outcome.extra_columns == {"judge": ["because 0.1", "because 0.9"]}
    (body,) = server.bodies
    assert server.authorizations == ["Bearer secret"]
    assert (body["model"], body["max_tokens"]) == ("judge", 99)
    rules, request = (message["content"] for message in body["messages"])
    assert "Be strict." in rules
    assert [request.index(text) for text in ("2 + 2 =", "5", "4")] == sorted(
        request.index(t) for t in ("2 + 2 =", "5", "4")
    )


@pytest.mark.parametrize(
    "scores", [[(1, 0.5)], [(1, 0.5), (1, 0.6)], [(1, 0.5), (2, 7.0)], [(1, 0.5), (2, 0.5), (3, 0.5)]]
)
def test_a_judge_that_does_not_score_each_once_fails_the_call(
    server: RewardServer, scores: list[tuple[int, float]]
) -> None:
    server.otherwise = _says(*scores)
    with pytest.raises(RewardError, match=server.url):
        _judged(server, ["5", "4"])
