"""The client against a scripted server (faults cannot be asked of a real one)."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from grpo_async.errors import BadResponseError, RequestRejectedError, ServerUnavailableError
from grpo_async.inference.client import Generation, InferenceClient
from grpo_async.inference.connections import BrokenConnectionError
from grpo_async.inference.router import FixedServers
from grpo_async.inference.surface import GenerateRequest
from grpo_async.records import FinishReason
from grpo_async.utils.retry import RetryPolicy


@dataclass(frozen=True)
class _Scripted:
    """One answer: an error status with its words, or lines, after which the connection breaks where `broken`."""

    lines: Sequence[str] = ()
    status: int = 200
    words: str = ""
    broken: bool = False


class _Answer:
    def __init__(self, scripted: _Scripted) -> None:
        self.status = scripted.status
        self._scripted = scripted

    async def read(self) -> bytes:
        return self._scripted.words.encode()

    async def lines(self) -> AsyncIterator[bytes]:
        for line in self._scripted.lines:
            yield line.encode()
        if self._scripted.broken:
            raise BrokenConnectionError("connection reset")


def _chunk(ids: list[int], *, version: int = 0, finish: str | None = None, **more: object) -> str:
    return json.dumps(
        {"token_ids": ids, "logprobs": [-0.5] * len(ids), "policy_version": version, "finish_reason": finish, **more}
    )


def _stream(*lines: str) -> _Scripted:
    return _Scripted(lines=lines)


_REFUSED = BrokenConnectionError("nobody is there")


class _Server:
    """Answers the n-th request with the n-th answer; the last one for ever."""

    def __init__(self, *answers: _Scripted | Exception) -> None:
        self._answers = answers
        self.requests: list[dict[str, object]] = []

    @asynccontextmanager
    async def post(self, body: bytes) -> AsyncIterator[_Answer]:
        self.requests.append(json.loads(body))
        answer = self._answers[min(len(self.requests), len(self._answers)) - 1]
        if isinstance(answer, Exception):
            raise answer
        yield _Answer(answer)

    async def aclose(self) -> None: ...


def _generate(
    server: _Server,
    *,
    max_retries: int = 3,
    max_tokens: int = 8,
    partial: Generation | None = None,
    request_timeout_s: float = 60.0,
    progress_timeout_s: float = 60.0,
) -> tuple[Generation, list[tuple[int, int]]]:
    seen: list[tuple[int, int]] = []

    async def run() -> Generation:
        retry = RetryPolicy(max_retries=max_retries, base_s=0.001, rng=random.Random(0))
        client = InferenceClient(
            FixedServers(["http://server"]),
            token="t",
            request_timeout_s=request_timeout_s,
            progress_timeout_s=progress_timeout_s,
            wait_timeout_s=5.0,
            retry=retry,
            connect=lambda url: server,
        )
        async with client:
            request = GenerateRequest(request_id="r", token_ids=[1, 2], max_tokens=max_tokens, temperature=1.0)
            return await client.generate(
                request, on_tokens=lambda count, version: seen.append((count, version)), partial=partial
            )

    return asyncio.run(run()), seen


def test_chunks_are_joined_and_each_token_keeps_its_version() -> None:
    server = _Server(_stream(_chunk([5, 6], version=3), _chunk([7], version=4), _chunk([], finish="stop")))
    generation, seen = _generate(server)
    assert generation.token_ids == [5, 6, 7]
    assert generation.logprobs == [-0.5, -0.5, -0.5]
    assert generation.policy_versions == [3, 3, 4]
    assert generation.finish_reason is FinishReason.STOP
    assert seen == [(2, 3), (1, 4)]


def test_a_generation_that_was_begun_goes_on_and_only_new_tokens_are_told() -> None:
    """What a resume brings: 2 of 8 tokens are there."""
    partial = Generation(token_ids=[5, 6], logprobs=[-0.1, -0.2], policy_versions=[3, 3])
    server = _Server(_stream(_chunk([7], version=4, finish="stop")))
    generation, seen = _generate(server, partial=partial)
    assert generation is partial
    assert (generation.token_ids, generation.policy_versions) == ([5, 6, 7], [3, 3, 4])
    assert generation.logprobs == [-0.1, -0.2, -0.5]
    assert seen == [(1, 4)]
    assert (server.requests[0]["token_ids"], server.requests[0]["max_tokens"]) == ([1, 2, 5, 6], 6)


@pytest.mark.parametrize("finish", [None, FinishReason.STOP])
def test_a_generation_that_was_whole_asks_nobody(finish: FinishReason | None) -> None:
    """It has its end, or as many tokens as were asked for."""
    length = 1 if finish else 8
    partial = Generation(
        token_ids=[5] * length, logprobs=[-0.1] * length, policy_versions=[3] * length, finish_reason=finish
    )
    server = _Server(_REFUSED)
    generation, _ = _generate(server, partial=partial)
    assert generation.finish_reason is (finish or FinishReason.LENGTH)
    assert server.requests == []


def test_every_sampling_field_is_sent() -> None:
    server = _Server(_stream(_chunk([5], finish="stop")))
    _generate(server)
    assert set(server.requests[0]) == set(GenerateRequest.model_fields)


@pytest.mark.parametrize(
    ("request_timeout_s", "progress_timeout_s", "expected_s"), [(60.0, 60.0, 4.0), (2.0, 60.0, 0.5), (60.0, 2.0, 0.5)]
)
def test_a_stream_is_never_as_silent_as_a_limit_of_silence(
    request_timeout_s: float, progress_timeout_s: float, expected_s: float
) -> None:
    """Else a healthy server that gathers tokens would be taken for a hung one, or the run for one that stands still."""
    server = _Server(_stream(_chunk([5], finish="stop")))
    _generate(server, request_timeout_s=request_timeout_s, progress_timeout_s=progress_timeout_s)
    assert server.requests[0]["flush_interval_s"] == expected_s


def test_a_broken_connection_goes_on_from_the_tokens_received() -> None:
    """Nothing that was sampled is lost or sampled twice."""
    server = _Server(
        _Scripted(lines=[_chunk([5, 6], version=1)], broken=True),
        _stream(_chunk([7], version=2, finish="stop")),
    )
    generation, _ = _generate(server)
    assert generation.token_ids == [5, 6, 7]
    assert generation.policy_versions == [1, 1, 2]
    assert server.requests[1]["token_ids"] == [1, 2, 5, 6]
    assert server.requests[1]["max_tokens"] == 6  # 8 - 2


def test_a_connection_that_breaks_after_the_last_token_ends_the_completion() -> None:
    server = _Server(_Scripted(lines=[_chunk([5, 6])], broken=True))
    generation, _ = _generate(server, max_tokens=2)
    assert generation.finish_reason is FinishReason.LENGTH
    assert len(server.requests) == 1


def test_an_aborted_request_goes_on_from_its_partial_tokens() -> None:
    """A server that is told to end aborts what it has; the cut completion must not be taken for a whole one."""
    server = _Server(_stream(_chunk([5], finish="abort")), _stream(_chunk([6], finish="stop")))
    generation, seen = _generate(server)
    assert generation.token_ids == [5, 6]
    assert generation.finish_reason is FinishReason.STOP
    assert sum(count for count, _ in seen) == 2
    assert server.requests[1]["token_ids"] == [1, 2, 5]


@pytest.mark.parametrize("max_retries", [0, 2])
def test_aborts_with_tokens_are_no_attempts_and_those_without_are_bounded(max_retries: int) -> None:
    """A push in mode abort ends what is in flight, and several may follow each other."""
    aborts = [_stream(_chunk([5], version=version, finish="abort")) for version in range(6)]
    server = _Server(*aborts, _stream(_chunk([6], version=6, finish="stop")))
    generation, _ = _generate(server, max_retries=max_retries)
    assert generation.token_ids == [5] * 6 + [6]
    assert generation.policy_versions == list(range(7))
    assert [len(request["token_ids"]) for request in server.requests] == [2, 3, 4, 5, 6, 7, 8]  # type: ignore[arg-type]
    assert [request["max_tokens"] for request in server.requests] == [8, 7, 6, 5, 4, 3, 2]
    server = _Server(_stream(_chunk([], finish="abort")))
    with pytest.raises(ServerUnavailableError, match="aborted the request"):
        _generate(server, max_retries=max_retries)
    assert len(server.requests) == 4 + max_retries  # 3 for nothing, then 1 attempt and its retries


def test_4xx_raises_at_once_with_the_servers_words() -> None:
    """R6.5: 4xx at once, with the body."""
    server = _Server(_Scripted(status=400, words='{"error": "prompt too long"}'))
    with pytest.raises(RequestRejectedError, match="400: prompt too long"):
        _generate(server)
    assert len(server.requests) == 1


@pytest.mark.parametrize("answer", [_Scripted(status=503, words="busy"), _REFUSED])
def test_5xx_and_connection_errors_are_retried_a_bounded_number_of_times(answer: _Scripted | Exception) -> None:
    """R6.5."""
    server = _Server(answer)
    with pytest.raises(ServerUnavailableError, match="failed 4 times in a row"):
        _generate(server, max_retries=3)
    assert len(server.requests) == 4


def test_an_error_line_is_retried_and_then_reported() -> None:
    server = _Server(_stream(_chunk([], error="engine died")))
    with pytest.raises(ServerUnavailableError, match="engine died"):
        _generate(server, max_retries=1)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"token_ids": [5, 6], "logprobs": [-0.5], "finish_reason": "stop"}', "2 tokens with 1 logprobs"),
        ('{"token_ids": [5], "logprobs": [null], "finish_reason": "stop"}', "not a chunk"),
        ('{"token_ids": [5], "logprobs": [NaN], "finish_reason": "stop"}', "not a chunk|not finite"),
        ("<html>gateway</html>", "not a chunk"),
    ],
)
def test_missing_short_or_non_finite_logprobs_fail_the_request(line: str, words: str) -> None:
    """Design, invariant 9: never zeros in their place."""
    with pytest.raises(BadResponseError, match=words):
        _generate(_Server(_stream(line)))


def test_an_answer_without_an_end_is_not_taken_for_a_whole_one() -> None:
    server = _Server(_stream(_chunk([5])))
    with pytest.raises(ServerUnavailableError, match="without a finish reason"):
        _generate(server, max_retries=0)
