"""The simulation: virtual seconds, the servers' arithmetic, and what the rules must give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks._simulated import Lengths, ServerSpeed, SimulatedServer, StandstillError, VirtualLoop
from benchmarks.simulation import Setup, simulate

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
    server.catch_up()
    assert server.busy_s == pytest.approx(11.0)
    assert server.load == 0
    assert all(task.done() for task in tasks)
    loop.close()


def test_a_synchronous_step_is_generation_then_training_then_the_push() -> None:
    found = simulate(replace(SETUP, max_staleness=0))
    assert found["step s"] == pytest.approx(19.0, abs=0.01)  # 100 tokens x 0.1 s; 8 rollouts in 16 slots; + 8 s + 1 s
    assert found["servers idle"] == pytest.approx(9 / 19, abs=0.01)
    assert found["trainer idle"] == pytest.approx(10 / 19, abs=0.01)
    assert found["mean staleness"] == found["thrown"] == 0


def test_a_staleness_of_one_hides_the_shorter_of_the_two_and_throws_nothing_away() -> None:
    found = simulate(SETUP)
    # the servers decode for 10 of 11 s: they stand still in the push
    assert found["step s"] <= 11.01
    assert found["servers idle"] <= 0.1
    assert 0 < found["mean staleness"] <= 1
    assert found["thrown"] == 0


def test_a_group_with_nothing_to_learn_from_costs_generation_but_no_training() -> None:
    found = simulate(replace(SETUP, max_staleness=0, filtered=0.5, steps=40))
    waits = found["trainer idle"] * found["step s"]  # a step whose groups are all of that kind waits for four more
    assert 10.0 < waits < 12.0
    assert 3.0 < found["step s"] - waits - SETUP.push_s < 5.5  # of 8 s of training


def test_training_takes_what_the_slowest_rank_of_each_forward_takes() -> None:
    """Samples of 110, 60 and 60 tokens with their prompts, two ranks, at most 110 a forward: 110 beside 60, then 60 beside nothing:
    110 x (0.02 + 0.11) + 60 x (0.02 + 0.06) = 19.1 s, where half of all would be 11.95."""
    setup = replace(SETUP, prompt=10, pair_s=0.001, lengths=replace(SETUP.lengths, longest=100))
    taken, even = setup.training([100, 50, 50])
    assert taken == pytest.approx(110 * 0.13 + 60 * 0.08)
    assert even == pytest.approx((110 * 0.13 + 2 * 60 * 0.08) / 2)
    assert setup.training([]) == (0.0, 0.0)
