"""The simulation: what the rules must give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks._models import SHAPES
from benchmarks.simulation import SCENARIOS, main
from grpo_async.checks.speed import step_seconds
from tests.support.configs import small_config


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
