"""Stand-ins for what the main loop talks to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from grpo_async.config import ExperimentConfig
from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.records import ScoredGroup
from grpo_async.run_directory import RunDir
from grpo_async.tracking import Trackers
from grpo_async.trainer.lead import Leader
from grpo_async.training.checkpoint import CheckpointState
from grpo_async.training.step import StepResult
from tests.support.configs import small_config


class FakeSource:
    """The leader's source without `take`: it has nothing to tell."""

    def reserve(self, num_groups: int, **_: Any) -> list[ScoredGroup]:
        return []

    def close_groups(self, *_: Any, **__: Any) -> None: ...

    def take_group_metrics(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        return {}

    def ledger_snapshot(self) -> dict[str, dict[str, int]]:
        return {"groups": {}, "tokens": {}}

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def gauges(self) -> dict[str, float]:
        return {}

    def advance(self, version: int) -> None: ...


class FakeSync:
    """FleetSync without servers. `up`: whether a server is there; `pushed`: the versions that reached it."""

    def __init__(self, *, up: bool = True) -> None:
        self.up = up
        self.fleet: Any = SimpleNamespace(
            has_ready=False,
            serving=lambda: ["another"],
            read_counters=lambda: SimpleNamespace(busy_s=0.0, generated_tokens=0),
            metrics=dict,
        )
        self.pushed: list[int] = []
        self.events: list[str] = []

    def push(self, version: int, *, before_gather: Callable[[int], None]) -> dict[str, float] | None:
        if not self.up:
            self.events.append(f"skip {version}")
            return None
        before_gather(1 << 20)
        self.fleet.has_ready = False
        self.pushed.append(version)
        self.events.append(f"push {version}")
        return {"sync/total_s": 0.1}

    def verify(self, score: Any) -> dict[str, float]:
        return {}

    def sleep_servers(self) -> None:
        self.events.append("sleep")


def loop_config(**sections: Any) -> ExperimentConfig:
    """One group of two samples a step, unless `sections` say otherwise."""
    return small_config(**{"rollout": {"groups_per_step": 1, "group_size": 2, "max_staleness": 3}, **sections})


def fake_context(config: ExperimentConfig, commands: list[Any], **more: Any) -> Any:
    """A trainer's context whose steps cost nothing; `commands` gets what rank 0 was sent."""
    default = {
        "world_size": 1,
        "channel": SimpleNamespace(send=lambda sent: commands.append(sent[0])),
        "pack": lambda command: None,
        "step": lambda *_, **__: StepResult(loss=0.0, grad_norm=1.0, num_tokens=4, updates=(True,), metrics={}),
        "checkpoints": SimpleNamespace(poll=lambda: None, take_metrics=dict),
        "device": torch.device("cpu"),
        "peaks": None,
    }
    return SimpleNamespace(config=config, **{**default, **more})


NO_EVALUATIONS: Any = SimpleNamespace(blocks_push=False, num_tokens=0, after_step=lambda *_, **__: None)


def make_leader(
    context: Any,
    source: Any,
    lines: list[dict[str, float]],
    *,
    stores: Callable[[int], bool] = lambda group_id: True,
    sync: Any = None,
    evaluations: Any = NO_EVALUATIONS,
    state: CheckpointState | None = None,
    log: Any = None,
) -> Leader:
    """Rank 0 whose metrics go to `lines` (or `log`), beside a generation that does nothing. `stores`: whether a group is kept."""
    here = Path("unused")
    store: Any = SimpleNamespace(stores=lambda group_id, status: stores(group_id))
    sync = sync or FakeSync()
    log = log or SimpleNamespace(write=lambda step, metrics: lines.append(metrics), sync=lambda: None)
    return Leader(
        Assignment(run_dir=RunDir(here), attempt_dir=here, private_dir=here),
        ControlClient(None),
        context,
        fleet=sync.fleet,
        source=source,
        store=store,
        sync=sync,
        evaluations=evaluations,
        log=log,
        trackers=Trackers(()),
        state=state,
        fingerprints={},
    )
