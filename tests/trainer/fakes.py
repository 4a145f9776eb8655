"""Stand-ins for what the main loop talks to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from grpo_async.config import ExperimentConfig
from grpo_async.processes.control import ControlClient
from grpo_async.records import ScoredGroup
from grpo_async.run_directory import RunDir
from grpo_async.tracking import Trackers
from grpo_async.trainer.loop import Trainer
from grpo_async.trainer.packed_step import Packer
from grpo_async.trainer.publish import Publisher
from grpo_async.trainer.report import Reporter
from grpo_async.trainer.saving import Saver
from grpo_async.training.checkpoint import CheckpointState
from grpo_async.training.optimizer import lr_factors
from grpo_async.training.pipeline import Activity
from grpo_async.training.ranks import Command, CommandChannel
from grpo_async.training.step import NonfiniteSteps, StepResult
from grpo_async.weights.push import GatherCommand
from tests.support.configs import small_config


class FakeSource:
    """The trainer's source without `take`: it has nothing to tell."""

    is_stopping = False

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
        self.served_version: int | None = None
        self.pushed: list[int] = []
        self.events: list[str] = []

    def push(self, version: int, *, send_to_ranks: Callable[[GatherCommand], None]) -> dict[str, float] | None:
        if not self.up:
            self.events.append(f"skip {version}")
            return None
        send_to_ranks(GatherCommand(bucket_bytes=1 << 20))
        self.fleet.has_ready = False
        self.served_version = version
        self.pushed.append(version)
        self.events.append(f"push {version}")
        return {"sync/total_s": 0.1}

    def verify(self, score: Any, *, is_proof: bool = False) -> dict[str, float]:
        return {}

    def sleep_servers(self) -> None:
        self.events.append("sleep")


def loop_config(**sections: Any) -> ExperimentConfig:
    """One group of two samples a step, unless `sections` say otherwise."""
    return small_config(**{"rollout": {"groups_per_step": 1, "group_size": 2, "max_staleness": 3}, **sections})


class FakeChannel(CommandChannel):
    """`sent` gets the commands of all ranks, each time."""

    def __init__(self, world_size: int = 1) -> None:
        self.sent: list[Sequence[Command]] = []
        self._world_size = world_size

    def send(self, commands: Sequence[Command]) -> None:
        self.sent.append(commands)

    @property
    def of_first(self) -> list[Command]:
        return [commands[0] for commands in self.sent]


def fake_context(config: ExperimentConfig, **more: Any) -> Any:
    """A trainer's context whose steps cost nothing."""
    world_size = more.get("world_size", 1)
    default = {
        "world_size": world_size,
        "channel": FakeChannel(world_size),
        "run_dir": RunDir(Path("unused")),
        "pack": lambda command: None,
        "step": lambda *_, **__: StepResult(loss=0.0, grad_norm=1.0, num_tokens=4, updates=(True,), metrics={}),
        "checkpoints": SimpleNamespace(poll=lambda: None, take_metrics=dict),
        "device": torch.device("cpu"),
        "policy": SimpleNamespace(one_sample_per_row=False, shares_prefixes=True),
        "peaks": None,
    }
    return SimpleNamespace(config=config, **{**default, **more})


NO_EVALUATIONS: Any = SimpleNamespace(is_over=True, num_tokens=0, after_step=lambda *_, **__: None)


def make_trainer(
    context: Any,
    source: Any,
    lines: list[dict[str, float]],
    *,
    stores: Callable[[int], bool] = lambda group_id: True,
    sync: Any = None,
    evaluations: Any = NO_EVALUATIONS,
    state: CheckpointState | None = None,
    log: Any = None,
) -> Trainer:
    """Rank 0 whose metrics go to `lines` (or `log`), beside a generation that does nothing. `stores`: whether a group is kept."""
    store: Any = SimpleNamespace(stores=lambda group_id, status: stores(group_id))
    sync = sync or FakeSync()
    log = log or SimpleNamespace(write=lambda step, metrics: lines.append(metrics), sync=lambda: None)
    control, activity = ControlClient(None), Activity()
    start = state.step if state else 0
    nonfinite = NonfiniteSteps(
        state.counters if state else {}, is_float16=context.config.model.compute_dtype == "float16"
    )
    return Trainer(
        context=context,
        control=control,
        fleet=sync.fleet,
        source=source,
        packer=Packer(context, source, store),
        sync=sync,
        publisher=Publisher(context=context, sync=sync, fleet=sync.fleet, source=source, activity=activity, version=start),
        evaluations=evaluations,
        nonfinite=nonfinite,
        lr_factor=lr_factors(context.config),
        reporter=Reporter(
            context=context, control=control, fleet=sync.fleet, source=source, evaluations=evaluations, log=log,
            trackers=Trackers(()), activity=activity, start=start,
        ),
        saver=Saver(
            context=context, source=source, log=log, nonfinite=nonfinite, evaluations=evaluations,
            activity=activity, fingerprints={}, saved_step=state.step if state else None,
        ),
        activity=activity,
        start=start,
    )  # fmt: skip
