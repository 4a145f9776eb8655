"""Checkpoints of a real run: nothing waits for a slow disk, and a damaged one is not gone on from."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.e2e.slow_disk import DELAY_S
from tests.e2e.support import Run, finish, make_run

pytestmark = pytest.mark.slow

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


def test_training_and_generation_go_on_while_a_checkpoint_is_written_slowly(tmp_path: Path) -> None:
    run = _run(
        tmp_path, "training.max_steps=160", "checkpoint.every_steps=80"
    )  # 80 steps take longer than the slow disk
    run.complete()
    lines = run.metrics()
    (begun,) = (line["step"] for line in lines if "checkpoint/staged_s" in line)
    (ended,) = (line["step"] for line in lines if "checkpoint/written_s" in line)
    assert begun == 81  # copied after step 80
    assert lines[begun - 1]["checkpoint/staged_s"] < 1.0
    assert lines[ended - 1]["checkpoint/written_s"] > DELAY_S
    assert lines[ended - 1]["checkpoint/bytes"] > 1_000_000
    meanwhile = lines[begun - 1 : ended - 1]
    assert len(meanwhile) >= 2, "no step was trained while the checkpoint was written"
    assert sum(line["perf/generated_tokens_per_s"] * line["step_time"] for line in meanwhile) > 100


def test_a_stop_waits_for_what_is_being_written_and_a_damaged_checkpoint_is_set_aside(tmp_path: Path) -> None:
    run = _run(tmp_path, "training.max_steps=5000", "checkpoint.every_steps=3")
    process = run.start()
    run.wait_for_step(4, process)  # that of step 3 is being written
    process.send_signal(signal.SIGTERM)
    done = finish(process, timeout_s=90.0)
    assert done.returncode == 143, done.stdout[-3000:]
    run.assert_nothing_is_left()
    checkpoints = run.folder / "checkpoints"
    last = len(run.metrics())
    assert {path.name for path in checkpoints.glob("step_*")} >= {"step_3", f"step_{last}"}
    assert not list(checkpoints.glob("writing_*"))

    tensors = checkpoints / f"step_{last}" / "__0_0.distcp"
    content = bytearray(tensors.read_bytes())
    content[len(content) // 2] ^= 1
    tensors.write_bytes(bytes(content))
    resumed = run.train("--resume", "--set", "training.max_steps=6", timeout_s=200.0)
    assert resumed.returncode == 0, resumed.stdout[-3000:] + run.logs()[-3000:]
    assert f"the checkpoint of step {last} is damaged" in " ".join(resumed.stdout.split())
    assert (checkpoints / f"broken_step_{last}").is_dir()
    assert [line["step"] for line in run.metrics()] == list(range(1, 7))
    assert run.summary()["ledger_closed"]
