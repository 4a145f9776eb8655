"""The simulation: what the rules must give."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks._simulated import Lengths, ServerSpeed
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
