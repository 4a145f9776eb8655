"""Figures of an update, worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_async.batching.pack import MicroBatch
from grpo_async.config.loss_sections import ClippedLoss
from grpo_async.training.loss import Objective
from grpo_async.training.metrics import UpdateFigures, step_metrics
from grpo_async.training.model import PolicyOutput


def test_the_extremes_of_clipping_are_those_of_samples() -> None:
    """Ratios 0.5, 1 | 0.5, 0.5, A = -1: half of sample 0 and all of sample 1 are clipped low: min 0.5, mean 3/4. The weights,
    0.5 x 3 and 1, have the mean 0.625 and the mean square 0.4375: ESS 0.625^2 / 0.4375 = 0.892857, chi-squared -0.5625."""
    ids = torch.zeros(1, 4, dtype=torch.int64)
    batch = MicroBatch(
        input_ids=ids,
        position_ids=ids,
        segment_ids=ids,
        source_index=torch.arange(4),
        target_ids=torch.zeros(4, dtype=torch.int64),
        sample_index=torch.tensor([0, 0, 1, 1]),
        sampler_logprobs=torch.tensor([0.5, 1.0, 0.5, 0.5]).log() * -1.0 - 1.0,
        advantages=-torch.ones(4),
        weights=torch.full((4,), 0.25),
        staleness=torch.zeros(4, dtype=torch.int64),
        minibatch_tokens=4,
    )
    objective = Objective(ClippedLoss(type="dapo"))
    figures = UpdateFigures(objective, torch.device("cpu"))
    policy = PolicyOutput(logprobs=torch.full((4,), -1.0, requires_grad=True), entropy=torch.full((4,), 2.0))
    figures.add(objective(policy, batch))
    metrics = step_metrics([figures.gather(torch.tensor(9.0))], objective)
    assert metrics["clip_ratio/low_min"] == 0.5
    assert metrics["clip_ratio/low_mean"] == metrics["clip_ratio/region_mean"] == 0.75
    assert metrics["clip_ratio/high_max"] == metrics["clip_ratio/high_mean"] == 0.0
    assert metrics["sampling/ess"] == pytest.approx(0.892857, abs=1e-5)
    assert metrics["sampling/chi_squared"] == pytest.approx(-0.5625, abs=1e-5)
    assert metrics["sampling/importance_sampling_ratio/min"] == pytest.approx(0.5)
    assert metrics["sampling/sampling_logp_difference/max"] == pytest.approx(math.log(2.0), abs=1e-5)
    assert (metrics["entropy"], metrics["grad_norm"], metrics["num_tokens"]) == (2.0, 3.0, 4.0)
