"""The simulation: what the rules must give."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks._models import SHAPES
from benchmarks._simulated import Lengths, ServerSpeed
from benchmarks.simulation import SCENARIOS, Setup, main, simulate
from grpo_async.checks.speed import step_seconds
from tests.support.configs import small_config

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


def test_the_plan_estimates_the_seconds_that_the_simulation_finds(tmp_path: Path) -> None:
    """Of all splits of configs/math.yaml, synchronous and not: within a fifth, where a factor of two is promised."""
    task, report = SCENARIOS["math"], tmp_path / "report.json"
    main(["--scenario", "math", "--staleness", "0", "2", "--json", str(report)])
    rows = {row["name"]: row["median"] for row in json.loads(report.read_text())["rows"]}
    for staleness in (0, 2):
        config = small_config(
            inference={"max_model_len": task.longest + 2 * task.prompt},
            rollout={
                "groups_per_step": task.groups, "group_size": task.group_size, "max_staleness": staleness,
                "max_completion_tokens": task.longest,
            },
            training={"micro_batch_tokens": task.longest + 2 * task.prompt},
        )  # fmt: skip
        for trainers in range(1, task.gpus):
            servers = task.gpus - trainers
            found = step_seconds(config, SHAPES["4b"].size, trainers, servers)[0]
            assert found == pytest.approx(
                rows[f"math, {trainers} + {servers}, max_staleness {staleness}: step"], rel=0.2
            )
