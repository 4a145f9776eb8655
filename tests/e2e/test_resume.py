"""Checkpoints of a real run: nothing waits for a slow disk, a damaged one is not gone on from, and a scheduler's SIGTERM at an
awkward moment saves the steps so far in time."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e.support import SMALL, Run, finish, make_run, rewards
from tests.e2e.user_rewards import DISK_DELAY_S, SCORED
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

STOP_TIMEOUT_S = 30.0
ENDLESS = (*SMALL, "training.max_steps=5000", f"launch.stop_timeout_s={STOP_TIMEOUT_S:g}")


def test_nothing_waits_for_a_slow_disk_but_a_stop_and_a_damaged_checkpoint_is_set_aside(tmp_path: Path) -> None:
    slow = rewards("user_rewards:exact_answer_with_a_slow_disk")
    settings = (*ENDLESS, "rollout.max_staleness=2", "checkpoint.every_steps=3", "evaluation=null", slow)
    run = make_run(tmp_path, "quickstart.yaml", settings)
    process = run.start()
    # that of step 3 is written, that of step 6 was due meanwhile: the one that is taken next is being written
    written = "checkpoint/written_s"
    run.wait_for(lambda: any(written in line for line in run.metrics()), process, what="a checkpoint")
    run.wait_for_step(len(run.metrics()) + 4, process)
    last = _stops_in_time(run, process)
    lines = run.metrics()
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


def _stops_in_time(run: Run, process: subprocess.Popen[str]) -> int:
    """SIGTERM: everything is saved and closed; returns the step that it stopped at."""
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    done = finish(process, timeout_s=STOP_TIMEOUT_S + 60.0)
    assert done.returncode == 143, done.stdout[-3000:] + run.logs()[-3000:]
    assert time.monotonic() - began < STOP_TIMEOUT_S + 15.0  # and the servers' end
    assert "was killed" not in done.stdout
    run.assert_nothing_is_left()
    stopped_at = len(run.metrics())
    assert run.checkpoints()[-1] == stopped_at
    summary = run.summary()
    assert (summary["status"], summary["steps"], summary["ledger_closed"]) == ("stopped", stopped_at, True)
    return stopped_at


def test_sigterm_during_an_evaluation_in_the_middle_of_training(tmp_path: Path) -> None:
    """An answer of the evaluation is scored for a minute: it runs when the signal comes, and would run past the deadline."""
    evaluation = ("evaluation.num_prompts=4", "evaluation.every_steps=1", "evaluation.at_start=false")
    settings = (*ENDLESS, "checkpoint.every_steps=1000", *evaluation, rewards("user_rewards:is_slow_for_evaluations"))
    run = make_run(tmp_path, "quickstart.yaml", settings)
    process = run.start()
    run.wait_for_step(3, process)
    run.wait_for(lambda: SCORED in run.logs(), process, what="an evaluation")
    stopped_at = _stops_in_time(run, process)
    run.complete("--resume", "--set", f"training.max_steps={stopped_at + 2}", "--set", "evaluation=null")


def test_sigterm_during_the_write_of_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, "quickstart.yaml", (*ENDLESS, "checkpoint.every_steps=1", "evaluation=null"))
    process = run.start()
    run.wait_for_step(2, process)
    checkpoints = run.folder / "checkpoints"

    def is_writing() -> bool:
        return any(not path.name.removeprefix("step_").isdecimal() for path in checkpoints.iterdir())

    assert eventually(is_writing, 60.0, every_s=0.001), "a checkpoint that is being written"
    stopped_at = _stops_in_time(run, process)
    assert not is_writing(), "half a checkpoint is left"
    run.complete("--resume", "--set", f"training.max_steps={stopped_at + 2}")
