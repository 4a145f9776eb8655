"""`rollout.max_in_flight: auto` against simulated servers, which run what fits into their KV cache and let the others wait."""

from __future__ import annotations

import asyncio

import pytest

from grpo_async.inference.api import ServerInfo
from grpo_async.rollout.pace import AdaptiveSlots
from tests.support.configs import small_config


def _info(*, running: int, waiting: int = 0, usage: float | None = 0.5) -> ServerInfo:
    return ServerInfo(
        engine="vllm", model="m", dtype="float32", max_model_len=64, policy_version=0,
        running_requests=running, waiting_requests=waiting, kv_usage=usage,
    )  # fmt: skip


async def _settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def _run(slots: AdaptiveSlots, rooms: list[int], *, num_servers: int = 1) -> list[int]:
    """Endless work on servers with room for so many requests together; the requests in flight after each report."""
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
        each = _info(running=running // num_servers, waiting=(slots.in_flight - running) // num_servers, usage=None)
        slots.report([each] * num_servers)
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


def test_the_limit_never_passes_its_bound_and_stays_where_work_is_short() -> None:
    async def run(rooms: list[int]) -> list[int]:
        return await _run(AdaptiveSlots(first=8, most=50, every_s=0.0), rooms)

    assert max(asyncio.run(run([1000] * 20))) == 50
    slots = AdaptiveSlots(first=8, most=50, every_s=0.0)
    slots.report([_info(running=4)])
    assert slots.limit == 8  # nobody waits for a slot


@pytest.mark.parametrize("crowded", [_info(running=8, usage=0.99), _info(running=8, waiting=4)])
def test_one_report_of_crowded_servers_changes_nothing_a_second_ends_the_growth(crowded: ServerInfo) -> None:
    slots = AdaptiveSlots(first=8, most=50, every_s=0.0)
    slots.in_flight = 8
    slots.report([crowded])
    slots.report([_info(running=8)])
    assert slots.limit == 16
    slots.report([crowded])
    slots.report([_info(running=0, waiting=8)])  # frozen by a push
    slots.report([crowded])
    assert slots.limit == 8


def test_auto_is_bounded_by_the_groups_that_may_be_started_ahead() -> None:
    rollout = {"max_in_flight": "auto", "max_staleness": 2, "groups_per_step": 4, "group_size": 8}
    config = small_config(rollout=rollout)
    assert config.rollout.most_in_flight == 3 * 4 * 8
    assert config.max_in_flight_evaluation_only == 96
