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
from grpo_async.inference.client import Generation, InferenceClient
from grpo_async.inference.router import FixedServers, Servers
from grpo_async.records import TOP
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


def _client(servers: Servers, *, max_retries: int = 3) -> InferenceClient:
    retry = RetryPolicy(max_retries=max_retries, base_s=0.001, rng=random.Random(0))
    return InferenceClient(servers, token="secret", request_timeout_s=60.0, wait_timeout_s=20.0, retry=retry)


def _request(**more: Any) -> GenerateRequest:
    return GenerateRequest(request_id="r", token_ids=[1, 2], max_tokens=8, temperature=1.0, **more)


def _run(work: Coroutine[Any, Any, Generation]) -> Generation:
    return asyncio.run(asyncio.wait_for(work, 60.0))


def _generate(url: str, request: GenerateRequest | None = None, *, max_retries: int = 3, **more: Any) -> Generation:
    async def run() -> Generation:
        async with _client(FixedServers([url]), max_retries=max_retries) as client:
            return await client.generate(request or _request(), **more)

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


def test_a_structured_output_that_is_interrupted_starts_over() -> None:
    request = _request(structured_outputs={"choice": ["a"]})
    partial = Generation(token_ids=array("i", [5]), logprobs=array("f", [-0.1]), policy_versions=array("i", [3]))
    with local_server(_scripted([line([6], finish=None), BreakOff()], [line([7, 8], version=4)])) as server:
        generation = _generate(server.url, request, partial=partial)
        assert (list(generation.token_ids), list(generation.policy_versions)) == ([7, 8], [4, 4])
        assert [(each["token_ids"], each["max_tokens"]) for each in server.requests] == [([1, 2], 8)] * 2


def test_the_likeliest_tokens_stay_those_of_their_positions_through_an_interruption() -> None:
    rows = [np.array([(n, -0.5), (n + 1, -1.5)], TOP) for n in (5, 6, 7)]
    sent = [base64.urlsafe_b64encode(row.tobytes()).decode() for row in rows]
    first = line([5, 6], finish=None, top_logprobs=sent[:2])
    with local_server(_scripted([first, BreakOff()], [line([7], top_logprobs=sent[2:])])) as server:
        turn = _generate(server.url, _request(top_logprobs=2)).turn([])
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


@pytest.mark.parametrize(
    ("answer", "kind", "message", "num_requests"),
    [
        ([Refusal(400, "prompt too long")], RequestRejectedError, "400: prompt too long", 1),
        ([Refusal(503, "busy")], ServerUnavailableError, "failed 4 times in a row.*503: busy", 4),
        ([line([], finish=None, error="engine died")], ServerUnavailableError, "4 times.*engine died", 4),
    ],
)
def test_4xx_raises_at_once_and_5xx_and_broken_answers_are_retried_a_bounded_number_of_times(
    answer: Answer, kind: type[Exception], message: str, num_requests: int
) -> None:
    """R6.5."""
    with local_server(_scripted(answer)) as server:
        with pytest.raises(kind, match=message):
            _generate(server.url, max_retries=3)
        assert len(server.requests) == num_requests


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

    with local_server(_counting(3, hold=True)) as server:
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
