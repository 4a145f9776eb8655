"""Checkpoints of a real run: nothing waits for a slow disk, a scheduler's SIGTERM while one is written saves the steps so far in
time, and a damaged one is not gone on from."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.e2e.support import SMALL, make_run, rewards, rows_of
from tests.e2e.user_rewards import DISK_DELAY_S

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

STOP_TIMEOUT_S = 30.0


def test_nothing_waits_for_a_slow_disk_but_a_stop_and_a_damaged_checkpoint_is_set_aside(tmp_path: Path) -> None:
    slow = rewards("user_rewards:exact_answer_with_a_slow_disk")
    endless = ("training.max_steps=5000", f"launch.stop_timeout_s={STOP_TIMEOUT_S:g}")
    settings = (*SMALL, *endless, "rollout.max_staleness=2", "checkpoint.every_steps=3", "evaluation=null", slow)
    run = make_run(tmp_path, "quickstart.yaml", settings)
    process = run.start()
    # that of step 3 is written, that of step 6 was due meanwhile: the one that is taken next is being written
    written = "checkpoint/written_s"
    run.wait_for(lambda: any(written in line for line in run.metrics()), process, what="a checkpoint")
    run.wait_for_step(len(run.metrics()) + 4, process)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    printed = run.end(process, 143, timeout_s=STOP_TIMEOUT_S + 60.0)
    assert time.monotonic() - began < STOP_TIMEOUT_S + 15.0  # and the servers' end
    assert "was killed" not in printed
    lines, summary = run.metrics(), run.summary()
    last = len(lines)
    assert run.checkpoints()[-1] == last
    assert (summary["status"], summary["steps"], summary["ledger_closed"]) == ("stopped", last, True)
    begun = next(line["step"] for line in lines if "checkpoint/staged_s" in line)
    ended = next(line["step"] for line in lines if written in line)
    assert begun == 4  # copied after step 3
    assert lines[begun - 1]["checkpoint/staged_s"] < 1.0
    assert lines[ended - 1][written] > DISK_DELAY_S
    assert lines[ended - 1]["checkpoint/bytes"] > 1_000_000
    meanwhile = lines[begun - 1 : ended - 1]
    assert len(meanwhile) >= 2, "no step was trained while the checkpoint was written"
    assert sum(line["perf/generated_tokens_per_s"] * line["step_time"] for line in meanwhile) > 100

    checkpoints = run.folder / "checkpoints"
    assert not list(checkpoints.glob("writing_*"))
    tensors = checkpoints / f"step_{last}" / "__0_0.distcp"
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(bytes(content))
    _, printed = run.complete("--resume", "--set", f"training.max_steps={last + 1}")
    assert f"the checkpoint of step {last} is damaged" in " ".join(printed.split())
    assert (checkpoints / f"broken_step_{last}").is_dir()


@pytest.mark.parametrize("sampling", ["{}", "{type: target_rate, retire_solved: 2}"])
def test_a_mixture_that_is_killed_goes_on_and_learns(tmp_path: Path, sampling: str) -> None:
    """The same sums twice, three of one source for each of the other, with a reward of their own each."""
    run = make_run(
        tmp_path,
        "quickstart.yaml",
        (
            "data.train=[{path: .cache/quickstart/seed_0/train.jsonl, weight: 3, label: sums, rewards: [exact_match]},"
            " {path: .cache/quickstart/seed_0/train.jsonl, label: more, rewards: [again]}]",
            f"data.sampling={sampling}",
            "rewards=[{function: grpo_async.rewards.text:exact_match},"
            " {function: grpo_async.rewards.text:exact_match, name: again, weight: 0.5}]",
            "training.max_steps=16", "checkpoint.every_steps=2", "evaluation.num_prompts=40",
        ),
    )  # fmt: skip
    process = run.start()
    run.wait_for_step(5, process)
    run.kill_everything(process)
    summary, _ = run.complete("--resume")
    assert summary["source/sums/reward_last"] > summary["source/sums/reward_first"] + 0.1
    scored: dict[str, list[dict[str, float | None]]] = {"sums": [], "more": []}
    for group in rows_of(run.folder):
        scored[group["columns"]["source_label"]] += [each["rewards"] for each in group["rollouts"]]
    assert len(scored["sums"]) == pytest.approx(3 * len(scored["more"]), rel=0.2)
    assert all(rewards.get("again") is None for rewards in scored["sums"])
    assert all(rewards.get("exact_match") is None for rewards in scored["more"])
    assert any(rewards.get("again") == 1.0 for rewards in scored["more"])
    assert ("data/seen" in run.metrics()[-1]) == (sampling != "{}")


def test_adapters_on_a_base_in_4_bits_go_on_after_a_kill_and_their_export_loads(tmp_path: Path) -> None:
    """The base is quantized anew; pushed is what the resumed layers compute with."""
    from transformers import AutoModelForCausalLM

    settings = ("model.lora={rank: 16, load_in_4bit: true}", "optimizer.lr=3e-3", "training.max_steps=16")
    run = make_run(tmp_path, "quickstart.yaml", (*settings, "checkpoint.every_steps=2", "evaluation.num_prompts=40"))
    process = run.start()
    run.wait_for_step(5, process)
    run.kill_everything(process)
    summary, _ = run.complete("--resume")
    assert summary["ledger_closed"]
    assert summary["evaluation"]["after"]["reward"] > summary["evaluation"]["before"]["reward"] + 0.2
    for line in run.metrics():
        assert line["sampling/kl"] < 0.05, line["step"]
    model = AutoModelForCausalLM.from_pretrained(run.folder / "model")
    assert not any("lora" in name for name, _ in model.named_parameters())
