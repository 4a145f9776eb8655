"""A run whose rollouts a function of the user makes, on the real vLLM (test_interactions has it on the embedded engine)."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import make_run
from tests.e2e.test_train import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.usefixtures("needs_vllm"), pytest.mark.nightly]


def test_with_vllm_the_weights_are_pushed_before_each_call_of_the_function(tmp_path: Path) -> None:
    """R5.2: synchronous, with a learning rate at which old weights would show: each call sees the version of its step, and its
    tokens have the trainer's own logprobs (ratio 1 within 1e-3, fp32 on both sides)."""
    settings = (
        *SMALL,
        "rollout.max_staleness=0",
        "rollout.zero_variance=train",
        "training.max_steps=3",
        "optimizer.lr=0.001",
        "evaluation=null",
        "rollout_function.function=tests.e2e.user_code:rollout_func",
        "rewards=[{function: 'tests.e2e.user_code:step_is_known'}, {function: 'grpo_async.quickstart.reward:exact_answer'}]",
    )
    run = make_run(tmp_path, "quickstart-vllm.yaml", settings)
    done = run.train(timeout_s=600.0)
    assert done.returncode == 0, done.stdout[-3000:] + run.logs()[-3000:]
    assert run.summary()["engine"] == "vllm"
    assert run.summary()["ledger_closed"]
    assert [line["rewards/step_is_known/mean"] for line in run.metrics()] == [1.0, 1.0, 1.0]
    for line in run.metrics():
        assert line["async/staleness_max"] == 0
        assert line["sampling/importance_sampling_ratio/min"] == pytest.approx(1.0, abs=1e-3)
        assert line["sampling/importance_sampling_ratio/max"] == pytest.approx(1.0, abs=1e-3)
