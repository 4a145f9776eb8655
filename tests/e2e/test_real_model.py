"""A pretrained model with the real vLLM: it learns, every step tells how far trainer and server are apart, and it goes on after
kill -9 of the engine.

The model is no part of this repository: GRPO_REAL_MODEL names a Hugging Face folder of a language model that continues plain text.
Weights, gradients, moments and the server's copy take about 30 bytes a parameter: 270 million need 9 GB, and half an hour on two
cores.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from statistics import fmean

import pytest

from tests.e2e.support import make_run, rewards

pytestmark = [pytest.mark.nightly, pytest.mark.slow, pytest.mark.vllm, pytest.mark.usefixtures("needs_vllm")]

BEGINNINGS = (
    "My favorite food is", "Every morning I like to", "The best thing about summer is", "In the middle of the forest",
    "She opened the door and", "Scientists have found that", "A good friend is someone who", "Last year we traveled to",
    "The old man looked at", "When the rain stopped,", "The secret of a long life is", "On the table there was",
    "The children ran down to", "Nobody in the village knew", "The train arrived late, so", "To bake bread you need",
)  # fmt: skip
STEPS = 20
SETTINGS = (
    "evaluation=null",
    f"training.max_steps={STEPS}",
    "training.micro_batch_tokens=1024",
    "training.logprob_chunk_tokens=128",
    "rollout.groups_per_step=4",
    "rollout.group_size=8",
    "rollout.max_completion_tokens=16",
    "optimizer.lr=3.0e-5",
    "optimizer.warmup_steps=0",
    "weights.verify_every_pushes=5",
    "checkpoint.every_steps=1000",
    "inference.vllm.kv_cache_mb=256",
    "inference.startup_timeout_s=600",
    "inference.heartbeat_timeout_s=120",
    "weights.timeout_s=300",
)


@pytest.fixture
def real_model() -> str:
    path = os.environ.get("GRPO_REAL_MODEL")
    if path is None:
        pytest.skip("GRPO_REAL_MODEL names no folder of a pretrained model")
    return path


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [0, 1])
def test_the_reward_rises_the_mismatch_is_told_and_the_run_goes_on_after_kill_9(
    real_model: str, tmp_path: Path, seed: int
) -> None:
    data = tmp_path / "beginnings.jsonl"
    data.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in BEGINNINGS))
    own = (f"model.path={real_model}", f"data.train.path={data}", f"run.seed={seed}")
    run = make_run(tmp_path, "quickstart-vllm.yaml", (*own, rewards("user_rewards:fraction_of_e"), *SETTINGS))
    process = run.start()
    run.wait_for_step(STEPS // 2, process, timeout_s=2400.0)
    run.server().kill()
    run.end(process, timeout_s=2400.0)
    summary, lines = run.summary(), run.metrics()
    assert summary["ledger_closed"]
    assert len(summary["server_failures"]) == 1
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    curve = [line["reward"] for line in lines]
    print(f"seed {seed}: reward {' '.join(f'{reward:.3f}' for reward in curve)}")
    for name in ("sampling_logp_difference/mean", "kl"):
        values = [line[f"sampling/{name}"] for line in lines]
        assert all(map(math.isfinite, values))
        print(
            f"seed {seed}: sampling/{name} {fmean(values):.2g} in the mean of {STEPS} steps, {max(values):.2g} at most"
        )
    verified = [line["sync/verify_mean"] for line in lines if "sync/verify_mean" in line]
    print(f"seed {seed}: sync/verify_mean {verified}")
    assert len(verified) >= STEPS // 5 - 1
    assert fmean(curve[-5:]) > 1.3 * fmean(curve[:5])
