"""Stand-ins for what the main loop talks to."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.records import ScoredGroup
from grpo_async.trainer.loop import LeaderLoop
from grpo_async.training.metrics import CounterSnapshot, PipelineMeter
from grpo_async.training.step import StepResult


class FakeSource:
    """The loop's source without `take`: it stores every group and has nothing to tell."""

    def stores(self, group_id: int) -> bool:
        return True

    def close_groups(self, *_: Any, **__: Any) -> None: ...

    def group_metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        return {}

    def gauges(self) -> dict[str, float]:
        return {}

    def advance(self, version: int) -> None: ...


class FakeSync:
    """FleetSync without servers. `up`: whether a server is there; `pushed`: the versions that reached it."""

    def __init__(self, *, up: bool = True) -> None:
        self.up = up
        self.has_ready = False
        self.has_serving = True
        self.pushed: list[int] = []
        self.events: list[str] = []

    def push(self, version: int, *, before_gather: Callable[[int], None]) -> dict[str, float] | None:
        if not self.up:
            self.events.append(f"skip {version}")
            return None
        before_gather(1 << 20)
        self.has_ready = False
        self.pushed.append(version)
        self.events.append(f"push {version}")
        return {"sync/total_s": 0.1}

    def verify(self, score: Any) -> dict[str, float]:
        return {}

    def sleep_servers(self) -> None:
        self.events.append("sleep")


def loop_config(**sections: Any) -> ExperimentConfig:
    """One group of two samples a step, unless `sections` say otherwise."""
    values = {
        "run": {"name": "test"}, "model": {"path": "m"}, "data": {"train": {"type": "jsonl", "path": "d.jsonl"}},
        "rewards": [{"function": "a:b"}], "rollout": {"groups_per_step": 1, "group_size": 2, "max_staleness": 3},
    }  # fmt: skip
    return ExperimentConfig.model_validate({**values, **sections})


def fake_context(config: ExperimentConfig, commands: list[Any], **more: Any) -> Any:
    """A trainer's context whose steps cost nothing; `commands` gets what rank 0 was sent."""
    default = {
        "num_ranks": 1,
        "channel": SimpleNamespace(send=lambda sent: commands.append(sent[0])),
        "step": lambda *_: StepResult(loss=0.0, grad_norm=1.0, num_tokens=4, updates=(True,), metrics={}),
        "checkpoints": SimpleNamespace(poll=lambda: None, take_metrics=dict),
    }
    return SimpleNamespace(config=config, **{**default, **more})


def make_loop(
    context: Any,
    source: Any,
    lines: list[dict[str, float]],
    *,
    sync: Any = None,
    on_read: Callable[[], object] = lambda: None,
    **more: Any,
) -> LeaderLoop:
    """A loop whose metrics go to `lines`, beside a generation that does nothing; `on_read` runs whenever that is looked at."""

    def read() -> CounterSnapshot:
        on_read()
        return CounterSnapshot(time_s=time.monotonic(), generation_busy_s=0.0, generated_tokens=0)

    return LeaderLoop(
        context,
        source=source,
        sync=sync or FakeSync(),
        read=read,
        on_step=lambda step, metrics, groups: lines.append(metrics),
        meter=PipelineMeter(read()),
        **more,
    )
