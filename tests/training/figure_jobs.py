"""What the ranks of the tests of token figures do: the real loop's step on rank 0, the real followers; run by `run_on_ranks`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from grpo_async.batching.minibatch import split_groups
from grpo_async.config.experiment import ExperimentConfig
from grpo_async.errors import GrpoAsyncError
from grpo_async.records import RolloutSample, ScoredGroup, TokenFigures
from grpo_async.rundir import RunDir
from grpo_async.training.loop import LeaderLoop
from grpo_async.training.loss import Objective
from grpo_async.training.metrics import PipelineMeter, Reading
from grpo_async.training.ranks import CommandChannel, TrainerContext, follow
from grpo_async.training.reference import Reference
from tests.support.rank_jobs import random_samples
from tests.support.records import make_scored
from tests.training.fakes import FakeSync, loop_config
from tests.training.shard_jobs import build

MODULE = "tests.training.figure_jobs"
TRAINER_VERSION = 3
GROUP_SIZE = 2


def figure_groups(count: int, *, seed: int = 0) -> list[ScoredGroup]:
    """Groups of two ragged samples, those of `random_samples`; each has an id of its own, and some tool tokens."""
    samples = [_with_tool_tokens(sample) for sample in random_samples(count * GROUP_SIZE, seed=seed, spread=0.2)]
    groups = []
    for group_id in range(count):
        mine = [
            replace(sample, group_id=group_id, rollout_id=f"g{group_id}-r{index}")
            for index, sample in enumerate(samples[group_id * GROUP_SIZE : (group_id + 1) * GROUP_SIZE])
        ]
        groups.append(replace(make_scored(group_id), samples=mine))
    return groups


def _with_tool_tokens(sample: RolloutSample) -> RolloutSample:
    """Its second sampled token and every fourth from there on are a tool's instead."""
    first = list(sample.loss_mask).index(1)
    mask = [int(bool(m) and (i - first) % 4 != 1) for i, m in enumerate(sample.loss_mask)]
    return replace(
        sample,
        loss_mask=mask,
        sampler_logprobs=[p if m else 0.0 for p, m in zip(sample.sampler_logprobs, mask, strict=True)],
        policy_versions=[v if m else -1 for v, m in zip(sample.policy_versions, mask, strict=True)],
    )


def figure_config(loss: Mapping[str, Any], *, minibatches: int = 1, **training: Any) -> ExperimentConfig:
    return loop_config(
        inference={"max_model_len": 64},
        rollout={"groups_per_step": 4, "group_size": GROUP_SIZE, "max_staleness": 4, "max_completion_tokens": 32},
        training={"max_steps": 9, "minibatches": minibatches, **training},
        optimizer={"lr": 1e-3},
        loss=loss,
    )


class FigureSource:
    """training.loop.RolloutSource of a store that keeps some groups only."""

    def __init__(self, kept: set[int] | None = None) -> None:
        self.kept = kept

    def stores(self, group_id: int) -> bool:
        return self.kept is None or group_id in self.kept


def figure_loop(place: TrainerContext, source: FigureSource) -> LeaderLoop:
    reading = Reading(time_s=0.0, generation_busy_s=0.0, generated_tokens=0)
    return LeaderLoop(
        place,
        source=source,  # type: ignore[arg-type]
        sync=FakeSync(),
        read=lambda: reading,
        on_step=lambda step, metrics: None,
        meter=PipelineMeter(reading),
        progress={},
    )


def figure_place(model: str, config: ExperimentConfig, *, reference: str | None, num_nodes: int = 1) -> TrainerContext:
    policy, optimizer = build(model, num_nodes=num_nodes)
    unused: Any = None
    return TrainerContext(
        config=config,
        rundir=RunDir(Path("unused")),
        policy=policy,
        optimizer=optimizer,
        objective=Objective.from_config(config),
        reference=None if reference is None else Reference(build(reference, num_nodes=num_nodes)[0]),
        parameters=unused,
        channel=CommandChannel(timeout_s=60.0),
        checkpoints=SimpleNamespace(wait=lambda: None),  # type: ignore[arg-type]
        tokenizer=None,
        device=torch.device("cpu"),
        num_ranks=dist.get_world_size(),
    )


def as_lists(figures: Mapping[str, TokenFigures]) -> dict[str, dict[str, list[float]]]:
    names = ("logprobs", "proximal_logprobs", "weights", "entropies", "marks")
    return {key: {name: [float(v) for v in getattr(row, name)] for name in names} for key, row in figures.items()}


def poison(groups: Sequence[ScoredGroup], *ids: int) -> list[ScoredGroup]:
    """The advantages of these groups are not a number."""
    return [
        replace(group, samples=[replace(sample, advantage=float("nan")) for sample in group.samples])
        if group.group.group_id in ids
        else group
        for group in groups
    ]


def train(
    model: str,
    reference: str,
    losses: dict[str, dict[str, Any]],
    *,
    num_groups: int = 6,
    minibatches: int = 1,
    num_nodes: int = 1,
    poisoned: Sequence[int] = (),
    kept: Sequence[int] | None = None,
    **training: Any,
) -> dict[str, Any]:
    """A step with each loss from the same weights; the figures of its tokens by rollout id, and its metrics."""
    results: dict[str, Any] = {}
    for name, loss in losses.items():
        config = figure_config(loss, minibatches=minibatches, **training)
        place = figure_place(model, config, reference=reference, num_nodes=num_nodes)
        if dist.get_rank() > 0:
            follow(place)
            continue
        loop = figure_loop(place, FigureSource(None if kept is None else set(kept)))
        groups = poison(figure_groups(num_groups), *poisoned)
        parts = split_groups(groups, minibatches)
        result, figures = loop._train(parts, TRAINER_VERSION + 1)
        loop.stop_followers()
        assert place.peaks is not None
        assert len(place.peaks) == dist.get_world_size()
        assert min(place.peaks) > 50 << 20, "a process with torch takes more"
        results[name] = {"figures": as_lists(figures), "metrics": result.metrics, "updates": result.updates}
    return results


def wait_for_a_rank(timeout_s: float) -> dict[str, Any]:
    """Rank 0 gathers; rank 1 does not. What rank 0 is told."""
    channel = CommandChannel(timeout_s=timeout_s)
    found = {}
    if channel.is_leader:
        try:
            channel.gather(torch.ones(5, 3))
        except GrpoAsyncError as error:
            found = {"type": type(error).__name__, "text": str(error)}
    dist.barrier()  # rank 1 is alive until here
    return found
