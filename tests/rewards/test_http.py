"""remote_reward against a real server on this machine."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from grpo_async.config.sections import RewardSection
from grpo_async.errors import ConfigError
from grpo_async.rewards import RewardError, load_rewards
from tests.rewards.helpers import loaded, score
from tests.rewards.reward_server import HANG, RewardServer, lengths, reward_server

REMOTE = "grpo_async.rewards.http:remote_reward"


@pytest.fixture(scope="module")
def one_server() -> Iterator[RewardServer]:
    with reward_server() as server:
        yield server


@pytest.fixture
def server(one_server: RewardServer) -> RewardServer:
    one_server.script.clear()
    one_server.otherwise = lengths
    one_server.bodies.clear()
    one_server.authorizations.clear()
    one_server.most_running = 0
    return one_server


def _values(
    server: RewardServer,
    completions: Sequence[Any],
    data: Mapping[str, Sequence[Any]] | None = None,
    timeout_s: float = 20.0,
    **arguments: Any,
) -> list[float | None]:
    given = {"url": server.url, **arguments}
    with loaded(REMOTE, name="judge", timeout_s=timeout_s, arguments=given) as reward:
        return asyncio.run(score(reward, completions, columns=data)).values


def _problem(server: RewardServer, completions: Sequence[Any], **more: Any) -> str:
    with pytest.raises(RewardError) as caught:
        _values(server, completions, **more)
    return str(caught.value)


def test_completions_and_columns_arrive_and_the_rewards_come_back_in_order(
    server: RewardServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")  # a proxy must not see prompts
    values = _values(server, ["a", "bb", "ccc"], {"answer": ["1", "2", "3"], "level": [4, 5, None]}, batch_size=2)
    assert values == [1.0, 2.0, 3.0]
    first = min(server.bodies, key=lambda body: body["completions"][0])
    assert first == {
        "prompts": ["What is it?"] * 2,
        "completions": ["a", "bb"],
        "columns": {"answer": ["1", "2"], "level": [4, 5]},
    }
    assert len(server.bodies) == 2  # 2 + 1 completions


def test_only_the_columns_that_are_named_are_sent_and_what_is_no_json_is_an_error(server: RewardServer) -> None:
    data = {"answer": ["1"], "secret": [object()]}
    assert _values(server, ["abc"], data, columns=["answer"]) == [3.0]
    assert server.bodies[0]["columns"] == {"answer": ["1"]}
    assert "a column cannot be sent as JSON" in _problem(server, ["a"], data=data)


def test_a_server_that_has_too_much_to_do_is_asked_again_when_it_says(server: RewardServer) -> None:
    asked_at: list[float] = []

    def answering(status: int, after: str = "") -> Callable[[Any], Any]:
        def answer(body: Any) -> Any:
            asked_at.append(time.monotonic())
            return status, b"slow down", {"retry-after": after}

        return answer

    server.script = [answering(429, "1"), answering(429, "whenever"), answering(503)]
    assert _values(server, ["abc"]) == [3.0]
    assert len(server.bodies) == 4
    assert asked_at[1] - asked_at[0] >= 1.0  # without being told: 0.2 s at most


@pytest.mark.parametrize(
    ("answer", "timeout_s", "text", "num_asked"),
    [
        ((502, b'{"detail": "no upstream"}'), 20.0, "failed 4 times; the last time: it answered 502: no upstream", 4),
        ((400, b'{"error": {"message": "too long"}}'), 20.0, "refused: it answered 400: too long", 1),
        ((400, b"[" * 100_000), 20.0, "refused: it answered 400: [[[", 1),
        (HANG, 0.5, "took longer than 0.5 s", 1),
    ],
    ids=["server error", "refusal", "refusal nested too deep", "silence"],
)
def test_only_what_may_go_away_is_asked_again(
    server: RewardServer, answer: Any, timeout_s: float, text: str, num_asked: int
) -> None:
    server.otherwise = lambda body: answer
    assert text in _problem(server, ["a"], timeout_s=timeout_s)
    assert len(server.bodies) == num_asked


def test_a_server_that_is_not_there_is_asked_again_and_then_named() -> None:
    problem = _problem(RewardServer(url="http://127.0.0.1:1/score"), ["a"])
    assert "http://127.0.0.1:1/score failed 4 times; the last time: ConnectError" in problem


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"rewards": [1.0]}, "completions 0 to 1: expected `rewards` with a list of 2, got {'rewards': [1.0]}"),
        (b'{"rewards": [1.0, NaN]}', "score 1 is nan; it must be a finite number"),
        ({"rewards": [1.0, "good"]}, "score 1 is 'good'"),
        ({"rewards": [True, 1.0]}, "score 0 is True"),
        ({"rewards": [10**400, 1.0]}, "score 0 is 1000"),
        ({"rewards": {"0": 1.0}}, "expected `rewards` with a list of 2"),
        ([1.0, 2.0], "expected `rewards` with a list of 2"),
        (b"<html>", "answered something that is not JSON: b'<html>'"),
        (b"\xff\xfe", "answered something that is not JSON"),
    ],
)
def test_an_unusable_answer_is_an_error_that_says_what_it_was(server: RewardServer, answer: Any, text: str) -> None:
    server.otherwise = lambda body: answer
    assert text in _problem(server, ["a", "b"])


def test_the_token_is_read_from_the_environment(server: RewardServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_TOKEN", "s3cret\n")
    assert _values(server, ["a"], token_env="JUDGE_TOKEN") == [1.0]
    assert _values(server, ["a"]) == [1.0]
    assert server.authorizations == ["Bearer s3cret", None]


def test_requests_at_once_are_bounded_over_all_calls(server: RewardServer) -> None:
    async def run() -> None:
        given = {"url": server.url, "batch_size": 1, "max_concurrency": 3}
        with loaded(REMOTE, arguments=given) as reward:
            await asyncio.gather(*(score(reward, ["a"] * 6) for _ in range(3)))

    asyncio.run(run())
    assert len(server.bodies) == 18
    assert 2 <= server.most_running <= 3


def test_one_failed_request_ends_the_call_without_waiting_for_the_others(server: RewardServer) -> None:
    server.otherwise = lambda body: (400, b"no") if body["completions"] == ["b"] else HANG
    assert "it answered 400: no" in _problem(server, ["a", "b"], batch_size=1)


def test_classify_sends_text_in_batches_and_reads_the_one_output(server: RewardServer) -> None:
    server.otherwise = lambda body: {
        "data": [
            {"index": index, "label": "good", "probs": [float(len(text))], "num_classes": 1}
            for index, text in reversed(list(enumerate(body["input"])))  # by index, not by place
        ]
    }
    # "What is it?" has 11 characters
    assert _values(server, ["a", "bb"], format="classify", model="rm", use_activation=False) == [12.0, 13.0]
    assert server.bodies == [{"input": ["What is it?a", "What is it?bb"], "model": "rm", "use_activation": False}]
    server.otherwise = lambda body: {"data": [{"index": 0, "probs": [0.1, 0.9]}]}
    assert "expected one of `probs` for each `index`" in _problem(server, ["a"], format="classify")


def test_classify_sends_one_conversation_in_a_request_with_arguments_as_text(server: RewardServer) -> None:
    server.otherwise = lambda body: {"data": [{"index": 0, "probs": [float(len(body["messages"]))]}]}
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    completions = [
        [{"role": "assistant", "content": "four"}],
        [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "content": "1"}],
    ]
    assert _values(server, completions, format="classify") == [2.0, 3.0]
    longest = max(server.bodies, key=lambda body: len(body["messages"]))
    assert longest["messages"][0] == {"role": "user", "content": "What is it?"}
    (sent,) = longest["messages"][1]["tool_calls"]
    assert json.loads(sent["function"]["arguments"]) == {"x": 1}


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"url": "judge:8000/score"}, "rewards.0.arguments.url: 'judge:8000/score' must begin with http://"),
        ({"url": "http://user:pass@judge/score"}, "put a token into an environment variable"),
        ({"format": "openai"}, "rewards.0.arguments.format: "),
        ({"token_env": "SURELY_NOT_SET"}, "the environment variable SURELY_NOT_SET is not set"),
        ({"batch_size": 0}, "rewards.0.arguments.batch_size: "),
        ({"batch_size": "32"}, "rewards.0.arguments.batch_size: "),
        ({"batchsize": 4}, "rewards.0.arguments.batchsize: there is no such setting"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(arguments: dict[str, Any], text: str) -> None:
    given = {"url": "http://judge/score", **arguments}
    with pytest.raises(ConfigError) as caught:
        load_rewards([RewardSection(function=REMOTE, arguments=given)])
    assert text in str(caught.value)
    assert "pass@" not in str(caught.value)


def test_a_column_with_the_name_of_a_setting_is_told_and_an_argument_settles_it(server: RewardServer) -> None:
    with pytest.raises(RewardError, match="if the data has a column of that name, set it in `arguments`"):
        _values(server, ["a"], {"model": ["x"]})
    assert _values(server, ["a"], {"model": ["x"]}, model=None) == [1.0]
