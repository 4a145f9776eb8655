"""What the ranks of the tests of token statistics and of host syncs do: the real loop's step on rank 0, the real followers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch.distributed as dist

from grpo_async.config import ExperimentConfig
from grpo_async.records import TOP, RolloutSample, ScoredGroup, TokenStats, TopArray
from grpo_async.run_directory import RunDir
from grpo_async.training.loss import Objective
from grpo_async.training.model import Reference
from grpo_async.training.ranks import CommandChannel, StopCommand, TrainerContext, follow
from tests.support.rank_jobs import build, fingerprint, random_samples
from tests.support.records import make_scored
from tests.trainer.fakes import FakeSource, loop_config, make_trainer

MODULE = "tests.training.statistics_jobs"
TRAINER_VERSION = 3
GROUP_SIZE = 2


def make_groups(count: int, *, seed: int = 0) -> list[ScoredGroup]:
    """Groups of two ragged samples, those of `random_samples`; each has an id of its own, and some tool tokens. The second of a
    group begins as the first does, with tokens that are trained in either."""
    samples = [_with_tool_tokens(sample) for sample in random_samples(count * GROUP_SIZE, seed=seed, spread=0.2)]
    groups = []
    for group_id in range(count):
        mine = [
            replace(sample, group_id=group_id, rollout_id=f"g{group_id}-r{index}")
            for index, sample in enumerate(samples[group_id * GROUP_SIZE : (group_id + 1) * GROUP_SIZE])
        ]
        shared = min(len(mine[0].token_ids), len(mine[1].token_ids) - 2)
        begins = np.concatenate([mine[0].token_ids[:shared], mine[1].token_ids[shared:]])
        mine[1] = replace(mine[1], token_ids=begins)
        mine = [replace(sample, top=_likeliest(sample)) for sample in mine]
        groups.append(replace(make_scored(group_id), samples=mine))
    return groups


def _likeliest(sample: RolloutSample) -> TopArray:
    """For each trained token five that follow it by number, of the probabilities 0.005 to 0.009; the tiny model is near 0.003."""
    trained = sample.token_ids[sample.loss_mask]
    top = np.empty((len(trained), 5), TOP)
    top["id"] = (trained[:, None] + np.arange(5)) % 300
    top["logprob"] = np.log(0.005 + 0.001 * np.arange(5))
    return top


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


def make_config(
    loss: Mapping[str, Any], *, minibatches: int = 1, optimizer: str = "adamw", **training: Any
) -> ExperimentConfig:
    return loop_config(
        inference={"max_model_len": 64},
        rollout={"groups_per_step": 4, "group_size": GROUP_SIZE, "max_staleness": 4, "max_completion_tokens": 32},
        training={"max_steps": 9, "minibatches": minibatches, **training},
        launch={"num_trainer_ranks": dist.get_world_size() if dist.is_initialized() else 1},
        optimizer={"type": optimizer, "lr": 1e-3},
        loss=loss,
    )


def make_context(
    model: str, config: ExperimentConfig, *, reference: str | None, num_nodes: int = 1, **more: Any
) -> TrainerContext:
    """`more`: see `build`."""
    sharing: dict[str, Any] = {"num_nodes": num_nodes, "context_parallel": config.training.context_parallel, **more}
    policy, optimizer = build(model, optimizer=config.optimizer.type, **sharing)
    unused: Any = None
    return TrainerContext(
        config=config,
        run_dir=RunDir(Path("unused")),
        policy=policy,
        optimizer=optimizer,
        objective=Objective(config.loss, num_updates=config.training.num_updates),
        reference=None if reference is None else Reference(build(reference, **sharing)[0]),
        parameters=unused,
        channel=CommandChannel(timeout_s=60.0),
        checkpoints=SimpleNamespace(wait=lambda: None),  # type: ignore[arg-type]
        tokenizer=None,
        device=next(policy.parameters()).device,
        world_size=dist.get_world_size(),
    )


def as_lists(statistics: Mapping[str, TokenStats]) -> dict[str, dict[str, list[float]]]:
    names = ("logprobs", "proximal_logprobs", "weights", "entropies", "flags")
    return {key: {name: [float(v) for v in getattr(row, name)] for name in names} for key, row in statistics.items()}


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
    device: str = "cpu",
    compute_dtype: str = "float32",
    **training: Any,
) -> dict[str, Any]:
    """A step with each loss from the same weights; the statistics of its tokens by rollout id, its metrics and the new weights. The
    advantages of the groups `poisoned` are not a number."""
    results: dict[str, Any] = {}
    for name, loss in losses.items():
        config = make_config(loss, minibatches=minibatches, **training)
        context = make_context(
            model, config, reference=reference, num_nodes=num_nodes, device=device, compute_dtype=compute_dtype
        )
        if dist.get_rank() > 0:
            follow(context)
            fingerprint(context.policy)
            continue
        trainer = make_trainer(context, FakeSource(), [], stores=lambda group_id: kept is None or group_id in kept)
        groups = make_groups(num_groups)
        for index in poisoned:
            samples = [replace(sample, advantage=float("nan")) for sample in groups[index].samples]
            groups[index] = replace(groups[index], samples=samples)
        step = TRAINER_VERSION + 1
        result, statistics = trainer.train_step(trainer.packer.pack(groups, step), step)
        context.channel.send([StopCommand()] * context.world_size)
        results[name] = {
            "statistics": as_lists(statistics),
            "metrics": result.metrics,
            "updates": result.updates,
            "tokens": result.num_tokens,
            "weights": fingerprint(context.policy),
        }
    return results
