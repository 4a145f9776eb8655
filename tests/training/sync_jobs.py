"""What ranks do in the tests that count host syncs and collectives: the real loop's step on rank 0, the real followers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from grpo_async.batching.minibatch import split_groups
from grpo_async.records import ScoredGroup
from grpo_async.training.model import Policy
from grpo_async.training.ranks import follow
from tests.training.figure_jobs import FigureSource, figure_config, figure_groups, figure_loop, figure_place
from tests.training.sync_counter import count_syncs

MODULE = "tests.training.sync_jobs"
LONGEST = 64
"""Tokens of every sample; each has a row of its own."""


def count(
    model: str, losses: dict[str, dict[str, Any]], cases: dict[str, dict[str, dict[str, Any]]], num_groups: int
) -> dict[str, dict[str, Any]]:
    """A step with each loss in several cuts; what rank 0 read from the device, which collectives it took part in, and its
    forwards. [loss][case]

    Args:
        losses: name -> `loss`; of "everything" the figures of its tokens are stored, too.
        cases: name of the loss -> name -> `training` settings.
    """
    return {
        loss: {
            name: _count(model, losses[loss], training, num_groups, loss == "everything")
            for name, training in cases[loss].items()
        }
        for loss in losses
    }


def _count(
    model: str, loss: dict[str, Any], training: dict[str, Any], num_groups: int, token_figures: bool
) -> dict[str, Any]:
    config = figure_config(loss, pack=False, **training)
    place = figure_place(model, config, reference=model if config.loss.beta else None)
    if dist.get_rank() > 0:
        follow(place)
        return {}
    loop = figure_loop(place, FigureSource(None if token_figures else set()))
    parts = split_groups([_lengthened(group) for group in figure_groups(num_groups)], config.training.minibatches)
    loop._train(parts, 4)  # what is made once is made
    with count_syncs(place.policy, place.optimizer) as counter:
        forwards = _count_forwards(place.policy)
        result, figures = loop._train(parts, 5)
    loop.stop_followers()
    return {
        "reads": dict(counter.reads),
        "collectives": {f"{who}: {what}": count for (who, what), count in counter.collectives.items()},
        "num_reads": counter.num_reads,
        "num_own_collectives": counter.num_own_collectives,
        "forwards": len(forwards),
        "updates": len(result.updates),
        "samples_with_figures": len(figures),
        "norm": result.grad_norm,
    }


def _lengthened(group: ScoredGroup) -> ScoredGroup:
    """Its samples with longer prompts."""
    samples = []
    for sample in group.samples:
        missing = LONGEST - len(sample.token_ids)
        samples.append(
            replace(
                sample,
                token_ids=[5] * missing + list(sample.token_ids),
                loss_mask=[0] * missing + list(sample.loss_mask),
                sampler_logprobs=[0.0] * missing + list(sample.sampler_logprobs),
                policy_versions=[-1] * missing + list(sample.policy_versions),
            )
        )
    return replace(group, samples=samples)


def _count_forwards(policy: Policy) -> list[None]:
    """Grows by one with every forward pass that has a gradient."""
    forwards: list[None] = []
    policy.register_forward_pre_hook(lambda *_: forwards.append(None) if torch.is_grad_enabled() else None)
    return forwards
