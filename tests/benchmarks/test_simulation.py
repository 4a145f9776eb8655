"""The simulation: virtual seconds, the servers' arithmetic, and what the rules must give."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from benchmarks._models import SIZES
from benchmarks._simulated import Lengths, ServerSpeed, SimulatedServer, StandstillError, VirtualLoop
from benchmarks.simulation import SCENARIOS, Setup, server_speed, simulate

SETUP = Setup(
    trainers=2,
    servers=2,
    max_staleness=1,
    groups_per_step=4,
    group_size=2,
    lengths=Lengths(mean=100, sigma=0.0, longest=1000),
    speed=ServerSpeed(slots=8, decode_s=0.1, row_s=0.0, prefill_s=0.0),
    train_s=0.02,  # 800 tokens on 2 GPUs: 8 s
    step_s=0.0,
    push_s=1.0,
    filtered=0.0,
    steps=16,
    seed=0,
)


def test_seconds_pass_only_in_the_loop_and_a_standstill_is_an_error() -> None:
    loop = VirtualLoop()
    told: list[float] = []
    loop.call_later(3600.0, lambda: told.append(loop.time()))
    loop.run_for(3599.0)
    assert told == []
    loop.run_for(2.0)
    assert told == [pytest.approx(3600.0)]
    assert loop.time() == pytest.approx(3601.0)
    with pytest.raises(StandstillError):
        loop.run_until_call()
    loop.close()


def test_a_server_slows_down_with_its_rows_stands_still_in_a_pause_and_computes_again_after_it() -> None:
    loop = VirtualLoop()
    server = SimulatedServer(loop, ServerSpeed(slots=2, decode_s=1.0, row_s=1.0, prefill_s=0.5))
    ended: dict[str, float] = {}

    async def request(name: str, length: int) -> None:
        await server.generate(length, lambda: None, lambda made: None)
        ended[name] = loop.time()

    tasks = [loop.create_task(request(name, length)) for name, length in (("a", 2), ("b", 4), ("c", 1))]
    # a and b: 2 rows, 3 s a step: a ends after 2 steps at 6, b has 2 left; c takes its slot: one step with b, ends at 9
    loop.run_for(10.0)  # b alone, 2 s a step: it would end at 11
    assert ended == pytest.approx({"a": 6.0, "c": 9.0})
    server.pause()  # b has 3.5 of its 4 tokens
    loop.run_for(5.0)
    server.resume()  # 3.5 tokens x 0.5 s = 1.75 s, then half a step: 15 + 1.75 + 1
    loop.run_for(2.74)
    assert "b" not in ended
    loop.run_for(0.02)
    assert ended["b"] == pytest.approx(17.75)
    assert server.busy_s() == pytest.approx(11.0)
    assert server.load == 0
    assert all(task.done() for task in tasks)
    loop.close()


def test_a_request_that_is_cancelled_gives_its_slot_back_and_says_what_it_made() -> None:
    loop = VirtualLoop()
    server = SimulatedServer(loop, ServerSpeed(slots=1, decode_s=1.0, row_s=0.0, prefill_s=0.0))
    made: list[int] = []
    first = loop.create_task(server.generate(100, lambda: None, made.append))
    second = loop.create_task(server.generate(5, lambda: None, made.append))
    loop.run_for(7.5)
    first.cancel()
    loop.run_for(5.5)
    assert made == [7]
    assert isinstance(asyncio.tasks.Task.exception(second), type(None))
    loop.close()


def test_a_synchronous_step_is_generation_then_training_then_the_push() -> None:
    outcome = simulate(replace(SETUP, max_staleness=0))
    assert outcome.wait_s == pytest.approx(10.0, abs=0.01)  # 100 tokens x 0.1 s; 8 rollouts in 16 slots
    assert outcome.step_s == pytest.approx(19.0, abs=0.01)  # + 8 s + 1 s
    assert outcome.overlap == pytest.approx(10 / 19, abs=0.01)
    assert outcome.generator_idle == pytest.approx(9 / 19, abs=0.01)
    assert outcome.trainer_idle == pytest.approx(10 / 19, abs=0.01)
    assert outcome.staleness_max == 0
    assert outcome.thrown == 0


def test_a_staleness_of_one_hides_the_shorter_of_the_two_and_throws_nothing_away() -> None:
    outcome = simulate(SETUP)
    # the servers decode for 10 of 11 s: they stand still in the push
    assert outcome.step_s <= 11.01
    assert 1.0 - outcome.generator_idle >= 0.9
    assert 0 < outcome.staleness <= 1
    assert outcome.staleness_max == 1
    assert outcome.thrown == 0


@pytest.mark.parametrize("servers", range(1, 8))
def test_at_every_split_running_ahead_gains_nine_tenths_of_what_it_can(servers: int) -> None:
    """(g + t) / max(g, t) is possible, g the wait of a synchronous step and t the rest of it."""
    setup = replace(
        SETUP, trainers=8 - servers, servers=servers, groups_per_step=16, group_size=8,
        lengths=Lengths(mean=2000, sigma=0.0, longest=2000),
        speed=ServerSpeed(slots=256, decode_s=0.012, row_s=0.00005, prefill_s=0.00002), train_s=0.0004, step_s=1.0,
    )  # fmt: skip
    synchronous, asynchronous = simulate(replace(setup, max_staleness=0)), simulate(setup)
    possible = synchronous.step_s / max(synchronous.wait_s, synchronous.step_s - synchronous.wait_s)
    assert synchronous.step_s / asynchronous.step_s >= 0.9 * possible
    assert asynchronous.overlap >= 0.9


def test_a_group_with_nothing_to_learn_from_costs_generation_but_no_training() -> None:
    outcome = simulate(replace(SETUP, max_staleness=0, filtered=0.5, steps=40))
    # a step whose groups are all of that kind waits for four more
    assert 10.0 < outcome.wait_s < 12.0
    assert 3.0 < outcome.step_s - outcome.wait_s - SETUP.push_s < 5.5  # of 8 s of training


def test_training_takes_what_the_slowest_rank_of_each_forward_takes() -> None:
    """Samples of 110, 60 and 60 tokens with their prompts, two ranks, at most 110 a forward: 110 beside 60, then 60 beside nothing:
    110 x (0.02 + 0.11) + 60 x (0.02 + 0.06) = 19.1 s, where half of all would be 11.95."""
    setup = replace(SETUP, prompt=10, pair_s=0.001, lengths=replace(SETUP.lengths, longest=100))
    taken, even = setup.training([100, 50, 50])
    assert taken == pytest.approx(110 * 0.13 + 60 * 0.08)
    assert even == pytest.approx((110 * 0.13 + 2 * 60 * 0.08) / 2)
    assert setup.training([]) == (0.0, 0.0)


def test_speeds_follow_from_the_size_of_a_model_and_the_data_sheet() -> None:
    """8.19e9 parameters, of which 7.57e9 are read in a step: 15.1 GB at 0.74 x 3.35 TB/s are 6.1 ms. KV of a token: 2 x 36 layers x
    8 heads x 128 x 2 bytes = 147 kB; a GPU has 72 - 4 - 16.4 = 51.6 GB for them: 350 rows of 1000 tokens."""
    speed = server_speed(SIZES["8b"], gpus=1, context=1000.0)
    assert speed.decode_s == pytest.approx(6.1e-3, rel=0.01)
    assert speed.slots == pytest.approx(350, abs=2)
    assert speed.row_s == pytest.approx(147e6 / 2.479e12 + 2 * 7.57e9 / (989e12 * 0.7), rel=0.05)
    two = server_speed(SIZES["8b"], gpus=2, context=1000.0)
    assert (two.decode_s, two.row_s) == (pytest.approx(speed.decode_s / 2), pytest.approx(speed.row_s / 2))
    assert two.slots > 2 * speed.slots  # one copy of the weights
    # 141 GB in bfloat16 at 40 GB/s
    assert SCENARIOS["70b"].push_s() == pytest.approx(3.57, abs=0.05)
    assert SCENARIOS["70b"].trainer_bytes(64) < 80e9 < SCENARIOS["70b"].trainer_bytes(16)
