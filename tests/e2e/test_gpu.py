"""Whole runs on one GPU that trainer and vLLM share: `scripts/test.sh -m gpu`. What a run on a CPU cannot show: weights over CUDA's
memory handles, graphs, sleep mode, and what a killed engine leaves on the device."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import SMALL, make_run

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.vllm, pytest.mark.usefixtures("needs_vllm")]

BASE = "quickstart-vllm.yaml"
SHARED = (*SMALL, "launch.device=cuda", "evaluation=null")
START_S = 240.0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_trainer_and_vllm_share_a_gpu_and_weights_go_over_ipc(dtype: str, tmp_path: Path) -> None:
    """The preflight and each push compare log-probabilities of both sides."""
    settings = (*SHARED, f"inference.dtype={dtype}", "training.max_steps=3", "weights.verify_every_pushes=1")
    run = make_run(tmp_path, BASE, settings)
    summary, _ = run.complete(timeout_s=START_S)
    assert (summary["engine"], summary["steps"]) == ("vllm", 3)
    assert "ipc" in (run.folder / "plan.txt").read_text()


def test_a_server_that_sleeps_while_the_trainer_works_wakes_up_with_the_new_weights(tmp_path: Path) -> None:
    asleep = ("inference.vllm.sleep_while_training=true", "rollout.max_staleness=0")
    settings = (*SHARED, *asleep, "training.max_steps=3", "weights.verify_every_pushes=1")
    summary, _ = make_run(tmp_path, BASE, settings).complete(timeout_s=START_S)
    assert summary["steps"] == 3


def test_a_run_goes_on_after_kill_nine_of_the_engine_in_a_push_and_of_everything(tmp_path: Path) -> None:
    settings = (*SHARED, "training.max_steps=400", "checkpoint.every_steps=2", "inference.restart_delay_s=0.2")
    run = make_run(tmp_path, BASE, settings)
    process = run.start()
    run.wait_for_step(2, process, timeout_s=START_S)
    run.kill_server_in_a_push()
    run.wait_for_servers(process, restarts=1)
    run.kill_everything(process)
    steps = run.metrics()[-1]["step"]
    run.end(run.start("--resume", "--set", f"training.max_steps={steps + 3}"), timeout_s=START_S)
    assert run.summary()["ledger_closed"]
