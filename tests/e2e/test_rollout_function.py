"""A run whose rollouts a function of the user makes, on real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.some_rollout_function import STEPS_FILE
from tests.e2e.support import make_run
from tests.e2e.test_train import SMALL

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    "base", ["quickstart.yaml", pytest.param("quickstart-vllm.yaml", marks=pytest.mark.vllm)], ids=["embedded", "vllm"]
)
def test_the_weights_are_pushed_before_each_call_of_the_function(
    tmp_path: Path, base: str, request: pytest.FixtureRequest
) -> None:
    """R5.2, R5.5: synchronous, with a learning rate at which old weights would show: one call per step, each sees the version
    of its step, and the tokens have the trainer's own logprobs (ratio 1 within 1e-3, fp32 on both sides)."""
    if "vllm" in base:
        request.getfixturevalue("needs_vllm")
    settings = (
        *SMALL,
        "rollout.max_staleness=0",
        "rollout.zero_variance=train",
        "training.max_steps=3",
        "optimizer.lr=0.001",
        "evaluation=null",
        "rollout_function.function=tests.e2e.some_rollout_function:generate_and_note_the_step",
    )
    run = make_run(tmp_path, base, settings)
    steps = tmp_path / "steps"
    done = run.train(timeout_s=600.0, environment={**os.environ, STEPS_FILE: str(steps)})
    assert done.returncode == 0, done.stdout[-3000:] + run.logs()[-3000:]
    assert steps.read_text().split() == ["0", "1", "2"]
    assert run.summary()["ledger_closed"]
    for line in run.metrics():
        assert line["async/staleness_max"] == 0
        assert line["sampling/importance_sampling_ratio/min"] == pytest.approx(1.0, abs=1e-3)
        assert line["sampling/importance_sampling_ratio/max"] == pytest.approx(1.0, abs=1e-3)
