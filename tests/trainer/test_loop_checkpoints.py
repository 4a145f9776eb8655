"""The main loop and its checkpoints: what is saved, and when a failed write is noticed."""

from __future__ import annotations

import contextlib
import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from grpo_async.buffer.resume import ResumeState
from grpo_async.errors import CheckpointError, RunError
from grpo_async.records import ScoredGroup
from grpo_async.tracking import MetricsWriter
from grpo_async.tracking.jsonl import append_whole
from grpo_async.trainer.loop import Trainer
from grpo_async.training.checkpoint import CheckpointState
from grpo_async.training.ranks import ExportCommand, SaveCommand, WaitCommand
from grpo_async.training.step import StepResult
from tests.support.records import make_scored
from tests.trainer.fakes import FakeSource, FakeSync, fake_context, loop_config, make_trainer


class _Stub(FakeSource):
    """Source and checkpoint writer in one."""

    def __init__(self, *, steps: int = 4, every: int = 2, **model: Any) -> None:
        self.states: list[CheckpointState] = []
        self.failure: CheckpointError | None = None
        config = loop_config(
            training={"max_steps": steps}, checkpoint={"every_steps": every}, model={"path": "m", **model}
        )
        self.context = fake_context(config, checkpoints=self, step=self.step, save=self.save)
        self.lines: list[dict[str, float]] = []
        self._num_taken = 0

    def trainer(self, state: CheckpointState | None = None, **more: Any) -> Trainer:
        return make_trainer(self.context, self, self.lines, state=state, **more)

    def step(self, *_: Any, **__: Any) -> StepResult:
        return StepResult(loss=0.0, grad_norm=1.0, num_tokens=4, updates=(True,), metrics={})

    def take(self, *_: Any, **__: Any) -> list[ScoredGroup]:
        self._num_taken += 1
        return [make_scored(self._num_taken)]

    def resume_state(self) -> ResumeState:
        return ResumeState(data={}, outstanding=[], ledger={})

    def stop_generating(self) -> None: ...

    def prepare(self, heartbeat: Callable[[], None]) -> None: ...

    def save(self, step: int, state: CheckpointState, **_: Any) -> None:
        self.states.append(state)

    def poll(self) -> None:
        if self.failure is not None and self.states:
            raise self.failure

    def wait(self, heartbeat: Callable[[], None]) -> None: ...

    def take_metrics(self) -> dict[str, float]:
        return {}


def test_a_step_that_overflows_float16_halves_the_loss_scale_which_is_saved_and_counts_as_bad_only_at_1() -> None:
    scales: list[float] = []

    class Overflowing(_Stub):
        def step(self, *arguments: Any, **more: Any) -> StepResult:
            scales.append(arguments[0].loss_scale)
            is_fine = arguments[0].loss_scale <= 1024.0
            return StepResult(
                loss=0.5, grad_norm=1.0 if is_fine else float("inf"), num_tokens=4, updates=(is_fine,), metrics={}
            )

    stub = Overflowing(steps=9, every=4, compute_dtype="float16")
    counters = {"loss_scale": 16384, "loss_scale_steps": 7}
    stub.trainer(CheckpointState(step=0, rollouts={}, counters=counters)).train()
    assert scales == [16384.0, 8192.0, 4096.0, 2048.0] + [1024.0] * 5
    assert [line["training/loss_scale"] for line in stub.lines] == scales
    assert stub.states[0].counters == {"bad_steps": 0, "loss_scale": 1024, "loss_scale_steps": 0}
    assert stub.states[1].counters == {"bad_steps": 0, "loss_scale": 1024, "loss_scale_steps": 4}

    stub.context.step = lambda *_, **__: StepResult(
        loss=0.5, grad_norm=float("inf"), num_tokens=4, updates=(False,), metrics={}
    )
    with pytest.raises(RunError, match="3 consecutive steps were not finite; step 4"):
        stub.trainer(CheckpointState(step=0, rollouts={}, counters={"loss_scale": 2})).train()


def test_without_a_server_at_the_end_the_model_is_saved_and_exported_while_the_other_ranks_are_told_to_wait() -> None:
    stub, sync = _Stub(), FakeSync(up=False)
    sync.fleet.wait_until_up = Mock(side_effect=RunError("all servers were given up"))
    stub.context.export = lambda *, heartbeat, **_: heartbeat()
    stub.trainer(sync=sync, evaluations=Mock(is_over=True)).finish(4)
    assert [state.step for state in stub.states] == [4]
    assert stub.context.channel.of_first == [SaveCommand(step=4), ExportCommand(), WaitCommand()]
    assert sync.events == ["skip 0"]  # after all of this


def test_a_run_that_has_reached_its_last_step_trains_no_more_and_ends_under_the_step_of_its_weights() -> None:
    for step in (4, 6):  # 6: epochs, and so the number of steps, were lowered since the checkpoint
        stub = _Stub(steps=4)
        assert stub.trainer(CheckpointState(step=step, rollouts={})).train() == step
        assert stub.lines == []


def test_a_write_that_failed_ends_the_run_at_the_next_step() -> None:
    stub = _Stub()
    stub.failure = CheckpointError("the disk is full")
    with pytest.raises(CheckpointError, match="the disk is full"):
        stub.trainer().train()
    assert len(stub.lines) == 2


class _Killed(BaseException):
    """Stands for SIGKILL."""


@pytest.mark.parametrize("is_full", [False, True], ids=["", "disk full"])
@pytest.mark.parametrize("moment", ["line", "sync", "copy", "written", "resume"])
def test_a_kill_between_a_line_and_its_checkpoint_leaves_neither_a_hole_nor_a_line_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str, is_full: bool
) -> None:
    """Of six steps with a checkpoint after every second: killed at the moment of step 4, and resumed. With a full disk the lines of
    steps 3 and 4 wait meanwhile."""
    path, saved = tmp_path / "metrics.jsonl", [CheckpointState(step=0, rollouts={})]
    killed: list[str] = []

    class Life(_Stub):
        step_now = 0

        def at(self, place: str) -> None:
            if place == moment and self.step_now == 4 and not killed:
                killed.append(place)
                raise _Killed

        def save(self, step: int, state: CheckpointState, **_: Any) -> None:
            self.at("copy")
            saved.append(state)
            self.at("written")

        def live(self) -> None:
            life, log = self, MetricsWriter(path, first_step=saved[-1].step + 1)

            class Log:
                def write(self, step: int, metrics: dict[str, float]) -> None:
                    life.step_now = step
                    log.write(step, metrics)
                    life.at("line")

                def sync(self) -> None:
                    log.sync()
                    life.at("sync")

            self.trainer(saved[-1], log=Log()).train()

    def append(descriptor: int, lines: bytes) -> None:
        if is_full and b'"step": 3' in lines:
            raise OSError(errno.ENOSPC, "No space left on device")
        append_whole(descriptor, lines)

    with monkeypatch.context() as patched:
        patched.setattr("grpo_async.tracking.jsonl.append_whole", append)
        with contextlib.suppress(_Killed, RunError):
            Life(steps=5 if moment == "resume" else 6).live()
    if moment == "resume":
        with monkeypatch.context() as patched:
            patched.setattr("grpo_async.utils.files.os.replace", Mock(side_effect=_Killed))
            with pytest.raises(_Killed):
                Life().live()
    killed.append("")
    Life(steps=6).live()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 4, 5, 6]
