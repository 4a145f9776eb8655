"""`rollout.max_in_flight: auto` against simulated servers, which run what fits into their KV cache and let the others wait."""

from __future__ import annotations

import asyncio

from grpo_async.inference.api import ServerInfo
from grpo_async.rollout.pace import AdaptiveSlots


def _info(*, running: int, waiting: int) -> ServerInfo:
    return ServerInfo(
        engine="vllm", model="m", dtype="float32", max_model_len=64, policy_version=0,
        running_requests=running, waiting_requests=waiting, kv_usage=None,
    )  # fmt: skip


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def _run(slots: AdaptiveSlots, rooms: list[int]) -> list[int]:
    """Endless work on a server with room for so many requests; the requests in flight after each report."""
    over, seen = asyncio.Event(), []
    turns: list[asyncio.Event] = []

    async def work() -> None:
        while not over.is_set():
            async with slots:
                turn = asyncio.Event()
                turns.append(turn)
                await turn.wait()

    workers = [asyncio.create_task(work()) for _ in range(500)]
    for room in rooms:
        await _settle()
        running = min(slots.in_flight, room)
        slots.report([_info(running=running, waiting=slots.in_flight - running)])
        for turn in turns[:]:  # all end, and others begin
            turns.remove(turn)
            turn.set()
        await _settle()
        seen.append(slots.in_flight)
    over.set()
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    return seen


def test_the_limit_finds_the_room_of_the_servers_stays_near_it_and_follows_it_down_and_up() -> None:
    async def run() -> list[int]:
        return await _run(AdaptiveSlots(first=8, most=400, every_s=0.0), [100] * 30 + [40] * 20 + [200] * 40)

    seen = asyncio.run(run())
    assert seen[2] == 64  # doubled at each report
    assert all(90 <= count <= 128 for count in seen[10:30]), seen
    assert all(36 <= count <= 52 for count in seen[38:50]), seen
    assert all(180 <= count <= 256 for count in seen[75:]), seen


def test_the_limit_never_passes_its_bound() -> None:
    async def run() -> list[int]:
        return await _run(AdaptiveSlots(first=8, most=50, every_s=0.0), [1000] * 20)

    assert max(asyncio.run(run())) == 50
