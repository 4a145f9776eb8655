"""remote_reward against a real server on this machine; the answers of vLLM are those of its own protocol classes."""

from __future__ import annotations

import asyncio
import datetime
import email.utils
import gc
import json
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from grpo_async.config.interaction_sections import RewardSection
from grpo_async.errors import ConfigError
from grpo_async.rewards import RewardError, RewardFunction, load_rewards
from grpo_async.rewards.http import _seconds
from tests.rewards.helpers import score
from tests.rewards.reward_server import HANG, RewardServer, lengths, reward_server
from tests.support.waiting import eventually

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
    one_server.clients.clear()
    one_server.most_running = 0
    return one_server


def _load(server: RewardServer, **arguments: Any) -> RewardFunction:
    section = RewardSection(function=REMOTE, name="judge", arguments={"url": server.url, **arguments}, timeout_s=20.0)
    (reward,) = load_rewards([section])
    _loaded.append(reward)
    return reward


_loaded: list[RewardFunction] = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Ends what the test has loaded, and with it the connections."""
    yield
    while _loaded:
        _loaded.pop().close()


def _values(
    server: RewardServer, completions: Sequence[Any], data: Mapping[str, Sequence[Any]] | None = None, **more: Any
) -> list[float | None]:
    return asyncio.run(score(_load(server, **more), completions, columns=data)).values


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


def test_only_the_columns_that_are_named_are_sent_and_token_ids_on_request(server: RewardServer) -> None:
    data = {"answer": ["1"], "secret": [object()]}
    assert _values(server, ["abc"], data, columns=["answer"], send_completion_ids=True) == [3.0]
    (body,) = server.bodies
    assert body["columns"] == {"answer": ["1"]}
    assert body["completion_ids"] == [[7]]


def test_a_column_that_is_no_json_is_named(server: RewardServer) -> None:
    with pytest.raises(RewardError, match=r"the column `odd` cannot be sent as JSON .* name the columns to send"):
        _values(server, ["a"], {"odd": [object()]})
    with pytest.raises(RewardError, match=r"the column `odd` cannot be sent as JSON"):
        _values(server, ["a"], {"odd": [{1, 2}]})


def test_a_server_that_has_too_much_to_do_is_asked_again_when_it_says(server: RewardServer) -> None:
    soon = email.utils.format_datetime(datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=1))
    asked_at: list[float] = []

    def answering(status: int, after: str = "") -> Callable[[Any], Any]:
        def answer(body: Any) -> Any:
            asked_at.append(time.monotonic())
            return status, b"slow down", {"retry-after": after}

        return answer

    server.script = [answering(429, "0.5"), answering(429, soon), answering(429, "whenever"), answering(503)]
    assert _values(server, ["abc"], max_retries=4) == [3.0]
    assert len(server.bodies) == 5
    assert asked_at[1] - asked_at[0] >= 0.5  # without being told: 0.2 s at most
    assert [_seconds(text) for text in ("3600", "-1", "nan", "")] == [60.0, 0.0, 0.0, 0.0]  # nobody can ask for an hour


@pytest.mark.parametrize(
    ("answer", "arguments", "text", "num_asked"),
    [
        ((502, b'{"detail": "no upstream"}'), {"max_retries": 1}, "failed 2 times; the last time: it answered 502: no upstream", 2),
        ((400, b'{"error": {"message": "too long"}}'), {}, "refused the request: it answered 400: too long", 1),
        (HANG, {"request_timeout_s": 0.3}, "was silent for 0.3 s; raise `request_timeout_s`", 1),
    ],
    ids=["server error", "refusal", "silence"],
)  # fmt: skip
def test_only_what_may_go_away_is_asked_again(
    server: RewardServer, answer: Any, arguments: dict[str, Any], text: str, num_asked: int
) -> None:
    server.otherwise = lambda body: answer
    began = time.monotonic()
    problem = _problem(server, ["a"], **arguments)
    assert problem.startswith("reward `judge`: raised RemoteRewardError: ")
    assert text in problem
    assert time.monotonic() - began < 5.0
    assert len(server.bodies) == num_asked


def test_a_server_that_is_not_there_is_asked_again_and_then_named() -> None:
    gone = RewardServer(url="http://127.0.0.1:1/score")
    problem = _problem(gone, ["a"], max_retries=1)
    assert "http://127.0.0.1:1/score failed 2 times; the last time: ConnectError" in problem


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"rewards": [1.0]}, "the answer has 1 scores for 2 completions (0 to 1)"),
        ({"rewards": [1.0, 2.0, 3.0]}, "the answer has 3 scores for 2 completions"),
        (b'{"rewards": [1.0, NaN]}', "the score of completion 1 is nan; it must be a finite number"),
        (b'{"rewards": [Infinity, 1.0]}', "the score of completion 0 is inf"),
        ({"rewards": [1.0, "good"]}, "the score of completion 1 is 'good'"),
        ({"rewards": [True, 1.0]}, "the score of completion 0 is True"),
        ({"rewards": {"0": 1.0}}, "where a list of 2 scores should stand"),
        ({"scores": [1.0, 2.0]}, "an answer has no `rewards`: {'scores': [1.0, 2.0]}; is `format` right"),
        ([1.0, 2.0], "an answer has no `rewards`"),
        (b"<html>", "answered something that is no JSON: b'<html>'"),
        (b"\xff\xfe", "answered something that is no JSON"),
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
        reward = _load(server, batch_size=1, max_concurrency=3)
        await asyncio.gather(*(score(reward, ["a"] * 6) for _ in range(3)))

    asyncio.run(run())
    assert len(server.bodies) == 18
    assert 2 <= server.most_running <= 3


def test_the_end_of_a_reward_closes_its_connections_and_a_later_call_makes_new_ones(server: RewardServer) -> None:
    reward = _load(server)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ResourceWarning)  # an unclosed socket or transport
        for _ in range(3):
            asyncio.run(score(reward, ["a"]))
        assert len(server.clients) == server.num_connections() == 1
        reward.close()
        gc.collect()
    assert eventually(
        lambda: server.num_connections() == 0, timeout_s=4.0
    )  # the server itself closes idle ones after 5 s
    asyncio.run(score(reward, ["a"]))
    reward.close()
    assert len(server.clients) == 2


def test_one_failed_request_ends_the_call_without_waiting_for_the_others(server: RewardServer) -> None:
    server.otherwise = lambda body: (400, b"no") if body["completions"] == ["b"] else HANG
    began = time.monotonic()
    assert "it answered 400: no" in _problem(server, ["a", "b"], batch_size=1)
    assert time.monotonic() - began < 5.0


def test_classify_sends_text_in_batches_and_reads_the_chosen_class(server: RewardServer) -> None:
    server.otherwise = lambda body: {
        "data": [
            {"index": index, "label": "good", "probs": [0.25, float(len(text))], "num_classes": 2}
            for index, text in reversed(list(enumerate(body["input"])))  # by index, not by place
        ]
    }
    # "What is it?" has 11 characters
    assert _values(server, ["a", "bb"], format="classify", score_index=1, model="rm") == [12.0, 13.0]
    assert server.bodies == [{"input": ["What is it?a", "What is it?bb"], "model": "rm"}]
    assert _values(server, ["a"], format="classify", score_index=-2, use_activation=False) == [0.25]
    assert server.bodies[-1]["use_activation"] is False
    assert "which has no score_index 2" in _problem(server, ["a"], format="classify", score_index=2)


def test_classify_sends_one_conversation_in_a_request_with_arguments_as_text(server: RewardServer) -> None:
    server.otherwise = lambda body: {
        "data": [{"index": 0, "label": None, "probs": [float(len(body["messages"]))], "num_classes": 1}]
    }
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
    assert call["function"]["arguments"] == {"x": 1}  # the caller's own is as it was


def test_pooling_reads_a_vector_or_the_last_token_of_a_matrix(server: RewardServer) -> None:
    vectors = [[0.1, 0.9], [[0.1, 0.2], [0.3, 0.4]]]
    server.otherwise = lambda body: {
        "data": [{"index": i, "object": "pooling", "data": vectors[i]} for i in range(len(body["input"]))]
    }
    assert _values(server, ["a", "b"], format="pooling", score_index=1) == [0.9, 0.4]
    server.otherwise = lambda body: {"data": [{"index": 0, "object": "pooling", "data": "AAAA"}]}
    assert "has 'AAAA', which has no score_index 0" in _problem(server, ["a"], format="pooling")


def test_score_sends_pairs_of_prompt_and_final_text(server: RewardServer) -> None:
    server.otherwise = lambda body: {
        "data": [
            {"index": i, "object": "score", "score": float(len(document))}
            for i, document in enumerate(body["documents"])
        ]
    }
    completions = [[{"role": "assistant", "content": "four"}], "six"]
    assert _values(server, completions, format="score") == [4.0, 3.0]
    assert server.bodies == [{"queries": ["What is it?"] * 2, "documents": ["four", "six"]}]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"url": "judge:8000/score"}, "rewards.0.arguments.url: 'judge:8000/score' must begin with http://"),
        ({"url": "http://user:pass@judge/score"}, "put a token into an environment variable"),
        ({"format": "openai"}, "rewards.0.arguments.format: "),
        ({"token_env": "SURELY_NOT_SET"}, "the environment variable SURELY_NOT_SET is not set"),
        ({"batch_size": 0}, "rewards.0.arguments.batch_size: "),
        ({"max_retries": -1}, "rewards.0.arguments.max_retries"),
        ({"request_timeout_s": 0}, "rewards.0.arguments.request_timeout_s"),
        ({"columns": "answer"}, "rewards.0.arguments.columns: "),
        ({"batchsize": 4}, "rewards.0.arguments.batchsize: there is no such setting"),
        ({"model": 3}, "rewards.0.arguments.model"),
        ({"use_activation": "no"}, "rewards.0.arguments.use_activation"),
    ],
)
def test_settings_that_cannot_work_are_refused_before_anything_starts(arguments: dict[str, Any], text: str) -> None:
    given = {"url": "http://judge/score", **arguments}
    with pytest.raises(ConfigError) as caught:
        load_rewards([RewardSection(function=REMOTE, arguments=given)])
    assert text in str(caught.value)
    assert "pass@" not in str(caught.value)


def test_a_column_with_the_name_of_a_setting_is_told_and_an_argument_settles_it(server: RewardServer) -> None:
    with pytest.raises(
        RewardError, match=r"model: .*string; if the data has a column of that name, set it in `arguments`"
    ):
        _values(server, ["a"], {"model": ["x"]})
    assert _values(server, ["a"], {"model": ["x"]}, model=None) == [1.0]
