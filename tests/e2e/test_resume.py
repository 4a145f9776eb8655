"""Checkpoints of a real run: nothing waits for a slow disk, and a damaged one is not gone on from."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.slow_disk import DELAY_S
from tests.e2e.support import Run, finish, make_run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

SMALL = (
    "rollout.groups_per_step=4",
    "rollout.group_size=4",
    "rollout.max_staleness=2",
    "optimizer.warmup_steps=0",
    "evaluation=null",
)


def _run(folder: Path, *more: str, reward: str = "tests.e2e.slow_disk:exact_answer_with_a_slow_disk") -> Run:
    run = make_run(folder, "quickstart.yaml", (*SMALL, *more))
    run.config.write_text(run.config.read_text() + f"rewards:\n- function: {reward}\n")
    return run


def test_nothing_waits_for_a_slow_disk_but_a_stop_and_a_damaged_checkpoint_is_set_aside(tmp_path: Path) -> None:
    run = _run(tmp_path, "training.max_steps=5000", "checkpoint.every_steps=3")
    process = run.start()
    # that of step 3 is written, that of step 6 was due meanwhile: the one that is taken next is being written
    wait_for(
        lambda: any("checkpoint/written_s" in line for line in run.metrics()), what="a checkpoint", timeout_s=120.0
    )
    run.wait_for_step(len(run.metrics()) + 4, process)
    process.send_signal(signal.SIGTERM)
    done = finish(process, timeout_s=90.0)
    assert done.returncode == 143, done.stdout[-3000:]
    run.assert_nothing_is_left()
    lines = run.metrics()
    begun = next(line["step"] for line in lines if "checkpoint/staged_s" in line)
    ended = next(line["step"] for line in lines if "checkpoint/written_s" in line)
    assert begun == 4  # copied after step 3
    assert lines[begun - 1]["checkpoint/staged_s"] < 1.0
    assert lines[ended - 1]["checkpoint/written_s"] > DELAY_S
    assert lines[ended - 1]["checkpoint/bytes"] > 1_000_000
    meanwhile = lines[begun - 1 : ended - 1]
    assert len(meanwhile) >= 2, "no step was trained while the checkpoint was written"
    assert sum(line["perf/generated_tokens_per_s"] * line["step_time"] for line in meanwhile) > 100

    checkpoints = run.folder / "checkpoints"
    last = len(lines)
    assert (checkpoints / f"step_{last}").is_dir()
    assert not list(checkpoints.glob("writing_*"))
    tensors = checkpoints / f"step_{last}" / "__0_0.distcp"
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(bytes(content))
    resumed = run.train("--resume", "--set", f"training.max_steps={last + 1}", timeout_s=200.0)
    assert resumed.returncode == 0, resumed.stdout[-3000:] + run.logs()[-3000:]
    assert f"the checkpoint of step {last} is damaged" in " ".join(resumed.stdout.split())
    assert (checkpoints / f"broken_step_{last}").is_dir()
    assert [line["step"] for line in run.metrics()] == list(range(1, last + 2))
    assert run.summary()["ledger_closed"]
