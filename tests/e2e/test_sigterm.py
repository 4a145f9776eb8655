"""SIGTERM of a scheduler at awkward moments: the steps so far are saved in time, whatever is going on."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from grpo_async.rundir import RunDir
from tests.e2e.hanging import SCORED
from tests.e2e.support import Run, finish, make_run, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

STOP_TIMEOUT_S = 30.0
ENDLESS = (
    "rollout.groups_per_step=2",
    "rollout.group_size=4",
    "training.max_steps=5000",
    "optimizer.warmup_steps=0",
    f"launch.stop_timeout_s={STOP_TIMEOUT_S:g}",
)


def _stopped_in_time(run: Run, began: float, output: str, code: int) -> int:
    """Everything is saved and closed; the step that it stopped at."""
    assert code == 143, output[-3000:] + run.logs()[-3000:]
    assert time.monotonic() - began < STOP_TIMEOUT_S + 15.0  # and the servers' end
    assert "was killed" not in output
    run.assert_nothing_is_left()
    stopped_at = len(run.metrics())
    assert RunDir(run.folder).checkpoint_steps()[-1] == stopped_at
    summary = run.summary()
    assert (summary["status"], summary["steps"]) == ("stopped", stopped_at)
    assert summary["ledger_closed"]
    return stopped_at


def _goes_on(run: Run, stopped_at: int, *arguments: str) -> None:
    resumed = run.train("--resume", "--set", f"training.max_steps={stopped_at + 2}", *arguments, timeout_s=180.0)
    assert resumed.returncode == 0, resumed.stdout[-3000:] + run.logs()[-3000:]
    assert [line["step"] for line in run.metrics()] == list(range(1, stopped_at + 3))
    assert run.summary()["ledger_closed"]


def test_during_an_evaluation_in_the_middle_of_training(tmp_path: Path) -> None:
    """An answer of the evaluation is scored for a minute: it runs when the signal comes, and would run past the deadline."""
    run = make_run(
        tmp_path,
        "quickstart.yaml",
        (
            *ENDLESS,
            "checkpoint.every_steps=1000",
            "evaluation.num_prompts=4",
            "evaluation.every_steps=1",
            "evaluation.at_start=false",
            "rewards=[{function: 'tests.e2e.hanging:is_slow_for_evaluations'}]",
        ),
    )
    process = run.start()
    run.wait_for_step(3, process)
    wait_for(lambda: SCORED in run.logs(), what="an evaluation", timeout_s=60.0)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    done = finish(process, timeout_s=STOP_TIMEOUT_S + 60.0)
    stopped_at = _stopped_in_time(run, began, done.stdout, done.returncode)
    _goes_on(run, stopped_at, "--set", "evaluation=null")


def test_during_the_write_of_a_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path, "quickstart.yaml", (*ENDLESS, "checkpoint.every_steps=1", "evaluation=null"))
    process = run.start()
    run.wait_for_step(2, process)
    checkpoints = run.folder / "checkpoints"

    def is_writing() -> bool:
        return any(not path.name.removeprefix("step_").isdecimal() for path in checkpoints.iterdir())

    wait_for(is_writing, what="a checkpoint that is being written", timeout_s=60.0, every_s=0.001)
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    done = finish(process, timeout_s=STOP_TIMEOUT_S + 60.0)
    stopped_at = _stopped_in_time(run, began, done.stdout, done.returncode)
    assert not is_writing(), "half a checkpoint is left"
    _goes_on(run, stopped_at)
