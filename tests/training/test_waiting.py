"""What the trainer's waits cost stands in the metrics, whole; and the tokens of a window are divided by its own seconds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_async.buffer.sample_buffer import SampleBuffer, Watch
from grpo_async.config import ExperimentConfig
from grpo_async.records import GroupStatus, ScoredGroup
from grpo_async.training.ranks import Command, WaitCommand
from grpo_async.training.step import StepResult
from tests.support.records import make_scored
from tests.training.fakes import FakeSource, make_loop


def _config() -> ExperimentConfig:
    return ExperimentConfig.model_validate(
        {
            "run": {"name": "test"}, "model": {"path": "m"}, "data": {"train": {"type": "jsonl", "path": "d.jsonl"}},
            "rewards": [{"function": "a:b"}], "rollout": {"groups_per_step": 1, "group_size": 2},
            "training": {"max_steps": 1},
        }
    )  # fmt: skip


class _Source(FakeSource):
    """A real buffer, asked again every 20 ms; everything else is nothing."""

    def __init__(self) -> None:
        self.buffer = SampleBuffer(max_groups=4, max_staleness=1, on_drop=_ignore)
        self.on_take: Callable[[], None] = lambda: None

    def take(
        self, num_groups: int, *, trainer_version: int, heartbeat: Callable[[], None], attend: Callable[[], None]
    ) -> list[ScoredGroup]:
        self.on_take()
        watch = Watch(timeout_s=30.0, setting="s", progress=lambda: 0, heartbeat=heartbeat, heartbeat_s=0.02)
        return self.buffer.take(num_groups, trainer_version=trainer_version, watch=watch)


def _ignore(scored: ScoredGroup, status: GroupStatus, step: int | None) -> None: ...


def _train_one_step(source: _Source) -> tuple[dict[str, float], list[Command]]:
    """One step of the real loop; the step itself takes no time. Its metrics, and what the other ranks were told."""
    commands: list[Command] = []
    result = StepResult(loss=0.0, grad_norm=1.0, num_tokens=4, updates=(True,), metrics={})
    place: Any = SimpleNamespace(
        config=_config(),
        num_ranks=1,
        obstacle_to_shared_prompts=None,
        channel=SimpleNamespace(send=lambda sent: commands.append(sent[0])),
        step=lambda micro_batches, lr, figures: result,
        checkpoints=SimpleNamespace(poll=lambda: None, take_metrics=dict),
    )

    steps: list[dict[str, float]] = []
    loop = make_loop(place, source, steps)
    assert loop.run(first_step=1) == 1
    return steps[0], commands


def test_the_wait_for_samples_is_counted_from_its_beginning_over_all_its_polls() -> None:
    """R1.12: samples come after 0.5 s, in which the queue was looked at about 25 times; all of it is idle time."""
    source = _Source()
    timer = threading.Timer(0.5, lambda: asyncio.run(source.buffer.put(make_scored())))
    source.on_take = timer.start
    metrics, commands = _train_one_step(source)
    timer.join()
    assert sum(isinstance(command, WaitCommand) for command in commands) >= 3, "it was one poll only"
    waited_s = metrics["pipeline/trainer_idle_ratio"] * metrics["step_time"]
    assert 0.5 <= waited_s <= metrics["step_time"]
    assert metrics["pipeline/waiting_share"] == pytest.approx(metrics["pipeline/trainer_idle_ratio"], abs=0.01)
