"""What `speed` goes by: what was measured over some steps, and the settings that advice is about. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from grpo_async.config import ExperimentConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineFigures:
    """Means over the last steps; shares are of the wall time of a step where nothing else is said. None: not measured."""

    num_steps: int
    step_s: float | None = None
    trainer_idle: float | None = None  # the trainer waits for samples
    generator_idle: float | None = None  # no server generates; the mean over the servers
    push_share: float | None = None  # the trainer pushes weights
    push_s: float | None = None  # seconds of one push
    checkpoint_s: float | None = None  # seconds that the trainer stands still for one checkpoint
    running: float | None = None  # requests that the servers generate for, all together
    waiting: float | None = None  # requests that wait inside the servers
    kv_usage: float | None = None  # of the servers' key/value caches, 0 to 1
    stale_share: float | None = None  # of the groups settled in these steps, those that were dropped for their age
    filtered_share: float | None = None  # of them, those whose rewards were all equal
    tool_share: float | None = None  # of a rollout's time, what its tools take
    scoring_share: float | None = None  # of a group's time from its first request on, what its rewards take
    padding_share: float | None = None  # of the tokens that are computed in training

    @property
    def train_s(self) -> float:
        """t: seconds of a step in which the trainer works; 0 where that is not measured."""
        return (self.step_s or 0.0) * (1.0 - (1.0 if self.trainer_idle is None else self.trainer_idle))

    @property
    def generation_s(self) -> float:
        """g: seconds of a step in which the servers generate; 0 where that is not measured."""
        return (self.step_s or 0.0) * (1.0 - (1.0 if self.generator_idle is None else self.generator_idle))


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSetup:
    """The settings that advice is about, under their names in the configuration."""

    group_size: int
    groups_per_step: int
    max_staleness: int
    max_in_flight: int
    zero_variance: str = "skip"
    weight_sync_steps: int = 1
    checkpoint_every_steps: int = 50
    num_trainer_ranks: int = 1  # of each machine that trains
    nodes: int = 1  # machines that train
    num_gpus: int | None = None  # of the machine with the servers and the first trainer ranks; None: not known
    replicas: int = 1
    tensor_parallel_size: int = 1
    embedded_slots: int | None = None  # `inference.embedded.max_slots`; None with another engine
    spawns_servers: bool = True  # False: others run them (`inference.urls`)
    on_gpu: bool = True  # whether processes have a GPU each; False: all share the cores of the machine
    pack: bool = True

    @property
    def world_size(self) -> int:
        """Trainer processes of all machines."""
        return self.nodes * self.num_trainer_ranks

    @property
    def most_in_flight(self) -> int:
        """Rollouts beyond which none is ever started: (max_staleness + 1) x groups_per_step x group_size."""
        return (self.max_staleness + 1) * self.groups_per_step * self.group_size


def setup_of(
    config: ExperimentConfig, *, engine: str | None = None, on_gpu: bool | None = None, num_gpus: int | None = None
) -> PipelineSetup:
    """`engine`: the one that was chosen, where the configuration says auto. `on_gpu`: whether the machine has GPUs, where that is
    known; else what the configuration says of the trainer's device. `num_gpus`: how many the machine has, where that is known."""
    inference = config.inference
    is_embedded = (engine or inference.engine) == "embedded"
    return PipelineSetup(
        group_size=config.rollout.group_size,
        groups_per_step=config.rollout.groups_per_step,
        max_staleness=config.rollout.max_staleness,
        max_in_flight=config.rollout.max_in_flight,
        zero_variance=config.rollout.zero_variance,
        weight_sync_steps=config.training.weight_sync_steps,
        checkpoint_every_steps=config.checkpoint.every_steps,
        num_trainer_ranks=config.launch.num_trainer_ranks,
        nodes=config.launch.nodes,
        num_gpus=num_gpus,
        replicas=len(inference.urls) or inference.replicas,
        tensor_parallel_size=inference.vllm.tensor_parallel_size,
        embedded_slots=inference.embedded.max_slots if is_embedded and not inference.urls else None,
        spawns_servers=not inference.urls,
        on_gpu=config.launch.device == "cuda" if on_gpu is None else on_gpu,
        pack=config.training.pack,
    )


def figures_of(metrics: Sequence[Mapping[str, float | None]]) -> PipelineFigures:
    """The figures of some steps in a row, oldest first, as they stand in metrics.jsonl.

    Two steps of 8 and 12 s, pushes of 1 s in each -> step_s = 10, push_share = (1 + 1) / (8 + 12) = 0.1. The ledger's totals are
    compared between the first and the last step: 90 -> 98 trained, 10 -> 12 stale: stale_share = 2 / (8 + 2) = 0.2.
    """
    wall_s = _sum(metrics, "step_time")

    def share(name: str) -> float | None:
        seconds = _sum(metrics, name)
        return None if seconds is None or not wall_s else seconds / wall_s

    settled = {
        state: _growth(metrics, f"ledger/groups/{state}") for state in ("trained", "filtered", "stale", "failed")
    }
    num_settled = sum(settled.values())
    rollout_s, tool_s = _mean(metrics, "rollout/duration_s"), _mean(metrics, "tools/duration_s/per_rollout")
    scoring_s = _mean(metrics, "scoring/duration_s")
    return PipelineFigures(
        num_steps=len(metrics),
        step_s=_mean(metrics, "step_time"),
        trainer_idle=_weighted(metrics, "pipeline/trainer_idle_ratio"),
        generator_idle=_weighted(metrics, "pipeline/generator_idle_ratio"),
        push_share=share("sync/push_s"),
        push_s=_mean(metrics, "sync/push_s"),
        checkpoint_s=_mean(metrics, "checkpoint/staged_s"),
        running=_mean(metrics, "servers/running"),
        waiting=_mean(metrics, "servers/waiting"),
        kv_usage=_mean(metrics, "servers/kv_usage"),
        stale_share=settled["stale"] / num_settled if num_settled else None,
        filtered_share=settled["filtered"] / num_settled if num_settled else None,
        tool_share=None if tool_s is None or not rollout_s else min(1.0, tool_s / rollout_s),
        scoring_share=None if scoring_s is None or not rollout_s else scoring_s / (scoring_s + rollout_s),
        padding_share=_mean(metrics, "training/padding_share"),
    )


def _values(metrics: Sequence[Mapping[str, float | None]], name: str) -> list[float]:
    values = (line.get(name) for line in metrics)
    return [float(value) for value in values if isinstance(value, int | float) and math.isfinite(value)]


def _mean(metrics: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    values = _values(metrics, name)
    return fmean(values) if values else None


def _sum(metrics: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    values = _values(metrics, name)
    return sum(values) if values else None


def _weighted(metrics: Sequence[Mapping[str, float | None]], name: str) -> float | None:
    """A share of the wall time over all steps together: shares 0.5 of 2 s and 0 of 8 s -> 0.1."""
    pairs = [(line.get(name), line.get("step_time")) for line in metrics]
    known = [(share, s) for share, s in pairs if share is not None and s and math.isfinite(share) and math.isfinite(s)]
    total_s = sum(s for _, s in known)
    return sum(share * s for share, s in known) / total_s if total_s else None


def _growth(metrics: Sequence[Mapping[str, float | None]], name: str) -> float:
    values = _values(metrics, name)
    return max(0.0, values[-1] - values[0]) if len(values) > 1 else 0.0
