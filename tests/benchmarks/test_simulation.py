"""The simulation: virtual seconds, the servers' arithmetic, and what the rules must give."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import simulation
from benchmarks._simulated import Lengths, ServerSpeed, SimulatedServer, StandstillError, VirtualLoop
from benchmarks.simulation import Outcome, Setup, main, simulate

SETUP = Setup(
    gpus=4,
    servers=2,
    max_staleness=1,
    queue_steps=2,
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
    outcome = simulate(replace(SETUP, max_staleness=0, queue_steps=1))
    assert outcome.wait_s == pytest.approx(10.0, abs=0.01)  # 100 tokens x 0.1 s; 8 rollouts in 16 slots
    assert outcome.step_s == pytest.approx(19.0, abs=0.01)  # + 8 s + 1 s
    assert outcome.overlap == pytest.approx(10 / 19, abs=0.01)
    assert outcome.generator_idle == pytest.approx(9 / 19, abs=0.01)
    assert outcome.trainer_idle == pytest.approx(10 / 19, abs=0.01)
    assert outcome.ideal_speedup == pytest.approx(1.9, abs=0.01)
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


def test_a_group_with_nothing_to_learn_from_costs_generation_but_no_training() -> None:
    outcome = simulate(replace(SETUP, max_staleness=0, queue_steps=1, filtered=0.5, steps=40))
    # a step whose groups are all of that kind waits for four more
    assert 10.0 < outcome.wait_s < 12.0
    assert 3.0 < outcome.step_s - outcome.wait_s - SETUP.push_s < 5.5  # of 8 s of training


def _outcome(**changed: float) -> Outcome:
    figures = {"step_s": 20.0, "wait_s": 5.0, "trainer_idle": 0.25, "generator_idle": 0.7, "overlap": 0.75, "staleness": 0.0,
               "staleness_max": 0.0, "thrown": 0.0}  # fmt: skip
    return Outcome(**{**figures, **changed})


def test_the_worst_split_decides_and_the_fastest_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Splits 1+2 and 2+1, both with an ideal of 20 / 15; the asynchronous runs take 15 and 16 s: 1 and 15 / 16 of it."""

    def simulated(setup: Setup) -> Outcome:
        if setup.max_staleness == 0:
            return _outcome()
        if setup.lengths.sigma == 0.0:
            return _outcome(step_s=14.0 + setup.servers, overlap=1.0 - 0.06 * setup.servers)
        return _outcome(step_s=10.0 * setup.servers * setup.queue_steps)

    monkeypatch.setattr(simulation, "simulate", simulated)
    file = tmp_path / "report.json"
    code = main(["--gpus", "3", "--steps", "12", "--staleness", "1", "--queue", "1", "2", "--json", str(file)])
    report = json.loads(file.read_text(encoding="utf-8"))
    rows = {row["name"]: row["values"] for row in report["rows"]}
    assert rows["constant lengths, max_staleness 1: speed-up / ideal, over the splits"] == pytest.approx([1.0, 15 / 16])
    assert rows["max_staleness 1, queue 1: best split 1+2"] == [360.0]
    assert rows["max_staleness 1, queue 2: best split 1+2"] == [180.0]
    assert [(target["value"], target["met"]) for target in report["targets"]] == [
        (pytest.approx(15 / 16), True),
        (pytest.approx(0.88), False),
    ]
    assert code == 1
    found = [(each["max_staleness"], each["queue_steps"], each["servers"]) for each in report["settings"]["outcomes"]]
    assert found == [(1, queue, servers) for queue in (1, 2) for servers in (1, 2)]
