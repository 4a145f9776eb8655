"""The whole, end to end, on the real vLLM server with real gloo pushes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import RECOVERY_S, SMALL, assert_on_policy, make_run

pytestmark = [pytest.mark.slow, pytest.mark.vllm, pytest.mark.usefixtures("needs_vllm")]

SYNCHRONOUS = (*SMALL, "rollout.max_staleness=0", "optimizer.lr=0.001", "rollout.zero_variance=train")


def test_after_every_push_vllms_logprobs_are_the_trainers_and_a_killed_launcher_leaves_no_vllm(tmp_path: Path) -> None:
    settings = (*SYNCHRONOUS, "training.max_steps=5000", "evaluation=null", "rollout.max_in_flight=auto")
    run = make_run(tmp_path, "quickstart-vllm.yaml", settings)
    process = run.start()
    run.wait_for_step(3, process, timeout_s=400.0)
    assert len(run.processes("vllm")) >= 1
    process.kill()
    process.communicate(timeout=30.0)
    run.assert_nothing_is_left(within_s=20.0)
    assert_on_policy(run.metrics())


@pytest.mark.nightly
@pytest.mark.parametrize("spread", ["inference.vllm.tensor_parallel_size=2", "inference.replicas=2"])
def test_swapped_adapters_reach_every_worker_and_every_server(tmp_path: Path, spread: str) -> None:
    lora = "model.lora={rank: 9, alpha: 20, push: adapter_swap}"
    verified = ("weights.verify_every_pushes=1", "training.max_steps=6", "evaluation=null")
    run = make_run(tmp_path, "quickstart-vllm.yaml", (*SYNCHRONOUS, lora, *verified, spread))
    run.complete(timeout_s=RECOVERY_S)
    assert_on_policy(run.metrics())
    assert all(line["sync/verify_max"] < 1e-3 for line in run.metrics())


@pytest.mark.nightly
def test_swapped_adapters_are_the_trainers_and_a_killed_server_gets_the_newest_before_requests(tmp_path: Path) -> None:
    lora = "model.lora={rank: 9, alpha: 20, push: adapter_swap}"  # a rank that vLLM does not have
    settings = (*SYNCHRONOUS, lora, "training.max_steps=12", "evaluation=null", "inference.restart_delay_s=0.2")
    run = make_run(tmp_path, "quickstart-vllm.yaml", settings)
    process = run.start()
    run.wait_for_step(3, process, timeout_s=RECOVERY_S)
    run.server().kill()
    run.wait_for_servers(process, restarts=1)
    run.end(process, timeout_s=RECOVERY_S)
    assert run.summary()["ledger_closed"]
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert_on_policy(lines)  # also after the restart: a base without adapter would show
    assert all(line["sync/phase/pause_s"] == 0.0 for line in lines)
