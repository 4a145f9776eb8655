"""A reward model by address, against a real server on this machine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from grpo_async.config.sections import RewardSection
from grpo_async.errors import ConfigError
from grpo_async.rewards import RewardError, load_rewards
from tests.rewards.helpers import score
from tests.rewards.reward_server import HANG, RewardServer, reward_server

PROMPT_CHARS = 11  # of "What is it?"


@pytest.fixture
def server() -> Iterator[RewardServer]:
    with reward_server() as server:
        yield server


def _values(
    server: RewardServer, completions: Sequence[Any], timeout_s: float = 20.0, **arguments: Any
) -> list[float | None]:
    (reward,) = load_rewards([RewardSection(model=server.url, timeout_s=timeout_s, arguments=arguments)])
    try:
        assert reward.name == "127.0.0.1"
        return asyncio.run(score(reward, completions)).values
    finally:
        reward.close()


def _problem(server: RewardServer, completions: Sequence[Any], **more: Any) -> str:
    with pytest.raises(RewardError) as caught:
        _values(server, completions, **more)
    return str(caught.value)


def test_text_is_sent_in_batches_and_scores_are_read_by_index(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # a proxy must not see prompts
    settings = {"served_model_name": "rm", "use_activation": False, "batch_size": 2}
    values = _values(server, ["a", "bb", "ccc"], **settings)
    assert values == [PROMPT_CHARS + 1.0, PROMPT_CHARS + 2.0, PROMPT_CHARS + 3.0]
    assert len(server.bodies) == 2  # 2 + 1 completions
    first = max(server.bodies, key=lambda body: len(body["input"]))
    assert first == {"input": ["What is it?a", "What is it?bb"], "model": "rm", "use_activation": False}


def test_one_conversation_is_sent_in_a_request_with_arguments_as_text(server: RewardServer) -> None:
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    completions = [
        [{"role": "assistant", "content": "four"}],
        [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "1"}],
    ]
    assert _values(server, completions) == [2.0, 3.0]
    longest = max(server.bodies, key=lambda body: len(body["messages"]))
    assert longest["messages"][0] == {"role": "user", "content": "What is it?"}
    (sent,) = longest["messages"][1]["tool_calls"]
    assert json.loads(sent["function"]["arguments"]) == {"x": 1}


def test_a_server_that_has_too_much_to_do_is_asked_again_when_it_says(server: RewardServer) -> None:
    asked_at: list[float] = []

    def answering(status: int, after: str = "") -> Callable[[Any], Any]:
        def answer(body: Any) -> Any:
            asked_at.append(time.monotonic())
            return status, b"slow down", {"retry-after": after}

        return answer

    server.script = [answering(429, "1"), answering(429, "whenever"), answering(503)]
    assert _values(server, ["abc"]) == [PROMPT_CHARS + 3.0]
    assert len(server.bodies) == 4
    assert asked_at[1] - asked_at[0] >= 1.0  # without being told: 0.2 s at most


@pytest.mark.parametrize(
    ("answer", "timeout_s", "text", "num_asked"),
    [
        ((502, b'{"detail": "no upstream"}'), 20.0, "failed 4 times; the last time: it answered 502: no upstream", 4),
        ((400, b'{"error": {"message": "too long"}}'), 20.0, "refused: it answered 400: too long", 1),
        (HANG, 0.5, "took longer than 0.5 s", 1),
    ],
    ids=["server error", "refusal", "silence"],
)
def test_only_what_may_go_away_is_asked_again(
    server: RewardServer, answer: Any, timeout_s: float, text: str, num_asked: int
) -> None:
    server.otherwise = lambda body: answer
    assert text in _problem(server, ["a"], timeout_s=timeout_s)
    assert len(server.bodies) == num_asked


@pytest.mark.parametrize(
    "answer",
    [
        {"data": [{"index": 0, "probs": [0.1]}]},
        {"data": [{"index": 0, "probs": [0.1, 0.9]}, {"index": 1, "probs": [0.5]}]},
        b'{"data": [{"index": 0, "probs": [NaN]}, {"index": 1, "probs": [0.5]}]}',
        b"<html>",
    ],
)
def test_an_unusable_answer_fails_the_call(server: RewardServer, answer: Any) -> None:
    server.otherwise = lambda body: answer
    assert f"{server.url}/classify" in _problem(server, ["a", "b"])


def test_the_token_is_read_from_the_environment(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret\n")
    _values(server, ["a"], token_env="JUDGE_TOKEN")
    _values(server, ["a"])
    assert server.authorizations == ["Bearer s3cret", None]


def test_requests_at_once_are_bounded_over_all_calls(server: RewardServer) -> None:
    async def run() -> None:
        section = RewardSection(model=server.url, arguments={"batch_size": 1, "max_concurrency": 3})
        (reward,) = load_rewards([section])
        await asyncio.gather(*(score(reward, ["a"] * 6) for _ in range(3)))
        reward.close()

    asyncio.run(run())
    assert len(server.bodies) == 18
    assert 2 <= server.most_running <= 3


@pytest.mark.parametrize(
    ("model", "arguments", "text"),
    [
        ("http://user:pass@judge/score", {}, "rewards.0.arguments.model: "),
        ("http://judge", {"token_env": "SURELY_NOT_SET"}, "the environment variable SURELY_NOT_SET is not set"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(
    model: str, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_rewards([RewardSection(model=model, arguments=arguments)])
    assert text in str(caught.value)
    assert "pass@" not in str(caught.value)
