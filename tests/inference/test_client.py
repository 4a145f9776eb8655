"""The client against servers on loopback that do what a test wants: a request that breaks continues there or on another server."""

from __future__ import annotations

import asyncio
import base64
import random
from array import array
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from grpo_async.errors import RequestRejectedError, ServerUnavailableError
from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.client import Generation, InferenceClient, OnTokens
from grpo_async.inference.router import FixedServers, Servers
from grpo_async.records import TOP, FinishReason
from grpo_async.utils.retry import RetryPolicy
from tests.inference.scripted_servers import ScriptedServers, address
from tests.support.local_server import BreakOff, LocalServer, Refusal, Request, Script, line, local_server

Answer = Sequence[bytes | Exception]
"""Parts that are sent, and where the answer ends before its end."""


def _scripted(*answers: Answer) -> Script:
    """The n-th answer for the n-th request; the last one forever."""
    left = list(answers)

    async def script(request: Request) -> AsyncIterator[bytes]:
        for part in left.pop(0) if len(left) > 1 else left[0]:
            if isinstance(part, Exception):
                raise part
            yield part

    return script


def _client(servers: Servers, *, max_retries: int = 3, timeout_s: float = 60.0, **settings: Any) -> InferenceClient:
    retry = RetryPolicy(max_retries=max_retries, base_s=0.001, rng=random.Random(0))
    return InferenceClient(
        servers, token="secret", request_timeout_s=timeout_s, wait_timeout_s=20.0, retry=retry, **settings
    )


def _request(name: str = "r", max_tokens: int = 8) -> GenerateRequest:
    return GenerateRequest(request_id=name, token_ids=[1, 2], max_tokens=max_tokens, temperature=1.0)


def _run(work: Coroutine[Any, Any, Generation]) -> Generation:
    return asyncio.run(asyncio.wait_for(work, 60.0))


def _generate(
    url: str,
    *,
    max_tokens: int = 8,
    on_tokens: OnTokens | None = None,
    partial: Generation | None = None,
    **settings: Any,
) -> Generation:
    async def run() -> Generation:
        async with _client(FixedServers([url]), **settings) as client:
            return await client.generate(_request(max_tokens=max_tokens), on_tokens=on_tokens, partial=partial)

    return _run(run())


def test_a_partial_generation_goes_on_and_only_new_tokens_are_told() -> None:
    """What a resume brings: 2 of 8 tokens are there."""
    partial = Generation(
        token_ids=array("i", [5, 6]), logprobs=array("f", [-0.1, -0.2]), policy_versions=array("i", [3, 3])
    )
    seen: list[tuple[int, int]] = []
    with local_server(_scripted([line([7], version=4)])) as server:
        generation = _generate(
            server.url, partial=partial, on_tokens=lambda count, version: seen.append((count, version))
        )
    assert generation is partial
    assert (list(generation.token_ids), list(generation.policy_versions)) == ([5, 6, 7], [3, 3, 4])
    assert list(generation.logprobs) == pytest.approx([-0.1, -0.2, -0.5])
    assert seen == [(1, 4)]
    assert (server.requests[0]["token_ids"], server.requests[0]["max_tokens"]) == ([1, 2, 5, 6], 6)
    assert set(server.requests[0]) == set(GenerateRequest.model_fields)  # so that no server default leaks in


def test_a_structured_output_that_is_interrupted_starts_over_and_its_attempts_are_bounded() -> None:
    request = _request().model_copy(update={"structured_outputs": {"choice": ["a"]}})

    async def run(url: str) -> Generation:
        partial = Generation(token_ids=array("i", [5]), logprobs=array("f", [-0.1]), policy_versions=array("i", [3]))
        async with _client(FixedServers([url])) as client:
            return await client.generate(request, partial=partial)

    with local_server(_scripted([line([6], finish=None), BreakOff()], [line([7, 8], version=4)])) as server:
        generation = _run(run(server.url))
        assert (list(generation.token_ids), list(generation.policy_versions)) == ([7, 8], [4, 4])
        assert [(each["token_ids"], each["max_tokens"]) for each in server.requests] == [([1, 2], 8)] * 2
    with (
        local_server(_scripted([line([6], finish=None), BreakOff()])) as server,
        pytest.raises(ServerUnavailableError, match="failed 4 times in a row"),
    ):
        _run(run(server.url))


@pytest.mark.parametrize("finish", [None, FinishReason.STOP])
def test_a_generation_that_was_whole_asks_nobody(finish: FinishReason | None) -> None:
    """It has its end, or as many tokens as were asked for."""
    length = 1 if finish else 8
    partial = Generation(
        token_ids=array("i", [5]) * length,
        logprobs=array("f", [-0.1]) * length,
        policy_versions=array("i", [3]) * length,
        finish_reason=finish,
    )
    generation = _generate("http://127.0.0.1:9", partial=partial)
    assert generation.finish_reason is (finish or FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("request_timeout_s", "progress_timeout_s", "expected_s"), [(60.0, 60.0, 4.0), (2.0, 60.0, 0.5), (60.0, 2.0, 0.5)]
)
def test_a_stream_is_never_as_silent_as_a_limit_of_silence(
    request_timeout_s: float, progress_timeout_s: float, expected_s: float
) -> None:
    """Otherwise a healthy server that collects tokens would count as hung, or the run as stalled."""
    with local_server() as server:
        _generate(server.url, timeout_s=request_timeout_s, progress_timeout_s=progress_timeout_s)
    assert server.requests[0]["flush_interval_s"] == expected_s


def test_the_likeliest_tokens_stay_those_of_their_positions_through_an_interruption() -> None:
    rows = [np.array([(n, -0.5), (n + 1, -1.5)], TOP) for n in (5, 6, 7)]
    sent = [base64.urlsafe_b64encode(row.tobytes()).decode() for row in rows]
    first = line([5, 6], finish=None, top_logprobs=sent[:2])
    with local_server(_scripted([first, BreakOff()], [line([7], top_logprobs=sent[2:])])) as server:
        request = _request().model_copy(update={"top_logprobs": 2})

        async def run() -> Generation:
            async with _client(FixedServers([server.url])) as client:
                return await client.generate(request)

        turn = _run(run()).turn([])
        assert [each["top_logprobs"] for each in server.requests] == [2, 2]
        assert turn.output_top is not None
        assert turn.output_top.tolist() == np.stack(rows).tolist()
    with local_server(_scripted([line([5, 6], top_logprobs=[])])) as server:
        assert _generate(server.url).turn([]).output_top is None


def test_aborts_with_tokens_are_no_attempts_and_those_without_are_bounded() -> None:
    """A push in mode abort ends what is in flight, and several may follow each other."""
    aborts = [[line([5], version=version, finish="abort")] for version in range(6)]
    with local_server(_scripted(*aborts, [line([6], version=6)])) as server:
        generation = _generate(server.url, max_retries=2)
    assert list(generation.token_ids) == [5] * 6 + [6]
    assert list(generation.policy_versions) == list(range(7))
    with local_server(_scripted([line([], finish="abort")])) as server:
        with pytest.raises(ServerUnavailableError, match="aborted the request"):
            _generate(server.url, max_retries=2)
        assert len(server.requests) == 4 + 2  # 3 for nothing, then 1 attempt and its retries


def test_4xx_raises_at_once_with_the_servers_message() -> None:
    """R6.5: 4xx at once, with the body."""
    with local_server(_scripted([Refusal(400, "prompt too long")])) as server:
        with pytest.raises(RequestRejectedError, match="400: prompt too long"):
            _generate(server.url)
        assert len(server.requests) == 1


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([Refusal(503, "busy")], "503: busy"),
        ([line([], finish=None, error="engine died")], "engine died"),
        ([line([], finish=None)], "without a finish reason"),
    ],
)
def test_5xx_and_connection_errors_are_retried_a_bounded_number_of_times(answer: Answer, message: str) -> None:
    """R6.5."""
    with local_server(_scripted(answer)) as server:
        with pytest.raises(ServerUnavailableError, match=f"failed 4 times in a row.*{message}"):
            _generate(server.url, max_retries=3)
        assert len(server.requests) == 4


# Several servers.


def _counting(version: int, *, hold: bool = False) -> Script:
    """One token after the other, each the number of tokens before it; with `hold` nothing more after two of them."""

    async def script(request: Request) -> AsyncIterator[bytes]:
        first = len(request["token_ids"])
        last = first + request["max_tokens"] - 1
        for number in range(first, last + 1):
            if hold and number == first + 2:
                await asyncio.Event().wait()
            yield line([number], version=version, finish="length" if number == last else None)

    return script


def _holding(version: int) -> Script:
    return _counting(version, hold=True)


def test_a_request_whose_server_is_fenced_goes_on_elsewhere_with_the_tokens_it_has() -> None:
    """Although the connection to it is still open: it hangs. No attempt is used up, as there is none."""

    async def test(hung: LocalServer, other: LocalServer) -> Generation:
        servers = ScriptedServers(hung.url, other.url)
        seen: list[int] = []

        def fence(count: int, version: int) -> None:
            seen.append(count)
            if len(seen) == 2:
                servers.set(servers.members[1])

        async with _client(servers, max_retries=0) as client:
            generation = await client.generate(_request(), on_tokens=fence)
            await asyncio.to_thread(hung.wait_for, lambda: hung.num_connections == 0, "the connection to be closed")
            return generation

    with local_server(_holding(3)) as hung, local_server(_counting(4)) as other:
        generation = _run(test(hung, other))
    assert list(generation.token_ids) == [2, 3, 4, 5, 6, 7, 8, 9]
    assert list(generation.policy_versions) == [3, 3, 4, 4, 4, 4, 4, 4]
    assert list(generation.logprobs) == [-0.5] * 8
    assert generation.finish_reason is FinishReason.LENGTH
    (continuation,) = other.requests
    assert continuation["token_ids"] == [1, 2, 2, 3]
    assert continuation["max_tokens"] == 6


@pytest.mark.parametrize(
    "wrong",
    [
        {"refuses": {"/rollout/score": 500}},
        {"answers": {"/rollout/score": {"logprobs": [-9.0, -9.0], "policy_version": 0}}},
    ],
    ids=["fails", "restarted-without-the-weights"],
)
def test_scores_come_from_a_server_that_has_the_weights_and_another_is_reported(wrong: dict[str, Any]) -> None:
    async def score(*servers: LocalServer) -> tuple[list[float], list[int]]:
        fleet = ScriptedServers(*(server.url for server in servers))
        fleet.versions = range(4, 7)
        async with _client(fleet, max_retries=1) as client:
            return await client.score([1, 2, 3]), fleet.suspected

    scores = {"logprobs": [-1.0, -2.0], "policy_version": 5}
    with local_server(**wrong) as other, local_server(answers={"/rollout/score": scores}) as good:
        logprobs, suspected = asyncio.run(asyncio.wait_for(score(other, good), 60.0))
        assert (logprobs, suspected) == ([-1.0, -2.0], [0])
        assert [body["token_ids"] for body in (*other.requests, *good.requests)] == [[1, 2, 3]] * 2
        with pytest.raises(ServerUnavailableError):
            asyncio.run(asyncio.wait_for(score(other), 60.0))


def test_with_no_server_left_a_request_waits_without_using_up_its_retries() -> None:
    async def test(server: LocalServer) -> Generation:
        servers = ScriptedServers(server.url)
        servers.on_suspect = lambda _: servers.set()  # the fleet asks it, and it is dead
        async with _client(servers, max_retries=1) as client, asyncio.TaskGroup() as tasks:
            task = tasks.create_task(client.generate(_request()))
            for instance_id in ("second", "third", "fourth"):
                asked = len(server.requests)
                await asyncio.to_thread(
                    server.wait_for, lambda asked=asked: len(server.requests) > asked, "the request"
                )
                await asyncio.to_thread(server.stop)
                while servers.members:
                    await asyncio.sleep(0.001)
                server.instance_id = instance_id
                if instance_id == "fourth":
                    server.script = _counting(4)
                await asyncio.to_thread(server.start)
                servers.set(address(0, server.url, instance_id))
        return task.result()

    with local_server(_holding(3)) as server:
        generation = _run(test(server))
    assert list(generation.token_ids) == list(range(2, 10))
    assert generation.policy_versions[-1] == 4


def test_every_request_names_the_instance_of_the_server_that_it_is_meant_for() -> None:
    """A server that was restarted has other weights: it refuses, is reported, and the request waits for it to be fit again."""

    async def test(server: LocalServer) -> Generation:
        servers = ScriptedServers(server.url)
        servers.on_suspect = lambda _: servers.set(address(0, server.url, "second"))  # seen, and pushed the weights
        async with _client(servers, max_retries=1) as client:
            first = await client.generate(_request())
            server.instance_id = "second"
            assert (await client.generate(_request())).token_ids == first.token_ids
            assert servers.suspected == [0]
            return first

    with local_server() as server:
        assert list(_run(test(server)).token_ids) == [7, 8]
        assert [body["instance_id"] for body in server.requests] == ["first", "first", "second"]
