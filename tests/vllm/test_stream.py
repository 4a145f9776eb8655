"""Stamping, flushing and counting, without vLLM."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest

from grpo_async.inference.surface import GenerateChunk
from grpo_async.servers.vllm.patches import mark_asking, wait_until_handed_out
from grpo_async.servers.vllm.state import InFlight, ServerState
from grpo_async.servers.vllm.stream import TokenStream


async def _all(stream: TokenStream) -> list[GenerateChunk]:
    async with asyncio.timeout(5):
        return [_without_time(chunk) async for chunk in stream.chunks()]


def _without_time(chunk: GenerateChunk) -> GenerateChunk:
    return chunk.model_copy(update={"first_token_s": None})


def test_a_chunk_holds_tokens_of_one_version_and_the_last_one_ends() -> None:
    async def run() -> list[GenerateChunk]:
        stream = TokenStream(flush_interval_s=60.0)
        stream.add([5], [-0.5], version=3, finish=None)
        stream.add([6], [-0.6], version=3, finish=None)
        stream.add([7], [-0.7], version=4, finish="stop")
        stream.add([8], [-0.8], version=4, finish=None)  # after the end: dropped
        return await _all(stream)

    assert asyncio.run(run()) == [
        GenerateChunk(token_ids=[5, 6], logprobs=[-0.5, -0.6], policy_version=3),
        GenerateChunk(token_ids=[7], logprobs=[-0.7], policy_version=4, finish_reason="stop"),
    ]


def test_an_end_without_tokens_is_a_line_of_its_own() -> None:
    async def run() -> list[GenerateChunk]:
        stream = TokenStream(flush_interval_s=0.0)
        stream.add([], [], version=2, finish="abort")
        return await _all(stream)

    assert asyncio.run(run()) == [GenerateChunk(policy_version=2, finish_reason="abort")]


@pytest.mark.parametrize("logprobs", [[-0.5], [-0.5, math.nan], [-math.inf, -0.5]])
def test_missing_and_non_finite_logprobs_end_the_stream_with_an_error(logprobs: list[float]) -> None:
    async def run() -> list[GenerateChunk]:
        stream = TokenStream(flush_interval_s=60.0)
        stream.add([4], [-0.4], version=1, finish=None)
        stream.add([5, 6], logprobs, version=1, finish="length")
        return await _all(stream)

    kept, error = asyncio.run(run())
    assert kept == GenerateChunk(token_ids=[4], logprobs=[-0.4], policy_version=1)
    assert error.token_ids == []
    assert error.finish_reason is None
    assert "2 tokens with the logprobs" in (error.error or "")


def test_a_version_change_sends_what_was_sampled_before_it_at_once() -> None:
    async def run() -> GenerateChunk:
        state = ServerState()
        stream = TokenStream(flush_interval_s=60.0)
        with state.streaming(_in_flight(), stream):
            stream.add([5], [-0.5], version=state.version, finish=None)
            state.change_version(1)
            async with asyncio.timeout(5):
                return await anext(stream.chunks())

    assert _without_time(asyncio.run(run())) == GenerateChunk(token_ids=[5], logprobs=[-0.5], policy_version=0)


def _in_flight() -> InFlight:
    async def submit(_: Any) -> Any:
        raise NotImplementedError

    return InFlight(submit, lambda _: None)


def test_busy_time_is_the_union_of_running_requests_without_pauses() -> None:
    now = 0.0
    state = ServerState(clock=lambda: now)
    first, second = TokenStream(flush_interval_s=1.0), TokenStream(flush_interval_s=1.0)
    with state.streaming(_in_flight(), first):  # 0 .. 10
        now = 2.0
        with state.streaming(_in_flight(), second):  # 2 .. 5
            assert len(state.in_flight) == 2
            now = 5.0
        now = 6.0
        state.set_paused(True)  # 6 .. 9
        now = 9.0
        state.set_paused(False)
        assert state.busy_s == 6.0
        now = 10.0
    now = 20.0
    assert state.busy_s == 7.0  # 0..6 and 9..10
    assert len(state.in_flight) == 0


def test_each_update_has_a_salt_of_its_own_also_when_its_version_comes_again() -> None:
    state = ServerState()
    salts = [state.salt]
    for version in (0, 1, 1, 0):
        state.change_version(version)
        assert state.version == version
        salts.append(state.salt)
    assert len(set(salts)) == 5


class _Client:
    """As vLLM's: a queue of batches, and a method that hands out the next."""

    def __init__(self) -> None:
        self.outputs_queue: asyncio.Queue[str] = asyncio.Queue()

    async def get(self) -> str:
        return await self.outputs_queue.get()


def test_waiting_for_outputs_ends_when_the_last_batch_is_handled_not_when_it_was_taken() -> None:
    events: list[str] = []

    async def handle_outputs(client: Any, may_handle: asyncio.Semaphore) -> None:
        ask = mark_asking(_Client.get)
        while True:
            batch = await ask(client)
            events.append(f"took {batch}")
            await may_handle.acquire()  # vLLM's task lets others run in the middle of a large batch
            events.append(f"handled {batch}")

    async def wait(client: Any) -> None:
        await wait_until_handed_out(client, timeout_s=5.0)
        events.append("waited")

    async def turn() -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    async def run() -> None:
        client, may_handle = _Client(), asyncio.Semaphore(0)
        await wait(client)  # nothing was ever asked for
        handler = asyncio.create_task(handle_outputs(client, may_handle))
        await turn()
        await wait(client)  # asked, and nothing there
        client.outputs_queue.put_nowait("1")
        client.outputs_queue.put_nowait("2")
        waiting = asyncio.create_task(wait(client))
        await turn()
        for _ in range(2):
            may_handle.release()
            await turn()
        await waiting
        handler.cancel()

    asyncio.run(run())
    assert events == ["waited", "waited", "took 1", "handled 1", "took 2", "handled 2", "waited"]
