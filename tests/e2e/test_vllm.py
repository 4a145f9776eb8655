"""The whole, end to end, on the real vLLM server with real gloo pushes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import make_run
from tests.e2e.test_train import SMALL

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.usefixtures("needs_vllm")]


def test_after_every_push_vllms_logprobs_are_the_trainers_and_a_killed_launcher_leaves_no_vllm(tmp_path: Path) -> None:
    """Synchronous, with a learning rate at which stale weights would show: at staleness 0 the ratio of every trained token is
    1 within 1e-3 (fp32 on both sides), although the weights moved between the steps."""
    settings = (
        *SMALL,
        "rollout.max_staleness=0",
        "training.max_steps=5000",
        "optimizer.lr=0.001",
        "rollout.zero_variance=train",
    )
    run = make_run(tmp_path, "quickstart-vllm.yaml", settings)
    process = run.start()
    run.wait_for_step(4, process, timeout_s=400.0)
    assert len(run.processes("vllm")) >= 1
    process.kill()
    process.communicate(timeout=30.0)
    run.assert_nothing_is_left(within_s=20.0)
    lines = run.metrics()
    for line in lines:
        assert line["async/staleness_max"] == 0
        assert line["sampling/importance_sampling_ratio/min"] == pytest.approx(1.0, abs=1e-3)
        assert line["sampling/importance_sampling_ratio/max"] == pytest.approx(1.0, abs=1e-3)


@pytest.mark.nightly
def test_asynchronous_training_on_vllm_trains_on_tokens_of_known_versions(tmp_path: Path) -> None:
    run = make_run(tmp_path, "quickstart-vllm.yaml", (*SMALL, "training.max_steps=6"))
    done = run.train(timeout_s=600.0)
    assert done.returncode == 0, done.stdout[-3000:] + run.logs()[-3000:]
    run.assert_nothing_is_left()
    summary = run.summary()
    assert summary["engine"] == "vllm"
    assert summary["ledger_closed"]
    assert summary["staleness_max"] <= 1
    assert sum(line["async/staleness_mean"] for line in run.metrics()) > 0, "nothing was generated ahead"
