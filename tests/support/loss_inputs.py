"""Small builders of what losses see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from pydantic import TypeAdapter

from grpo_async.batching.pack import MicroBatch, Segment
from grpo_async.config.sections import BaseLoss, LossSection
from grpo_async.training.loss import LossInputs


def loss_section(**values: Any) -> BaseLoss:
    """The section `loss` with these settings."""
    section: BaseLoss = TypeAdapter(LossSection).validate_python(values)
    return section


def make_inputs(
    ratios: Sequence[float], advantages: Sequence[float], *, samples: Sequence[int] | None = None
) -> LossInputs:
    """Tokens whose logprob is -1 and whose ratio to the proximal policy is given. The gradient is at `logprobs`."""
    count = len(ratios)
    logprobs = torch.full((count,), -1.0).requires_grad_()
    old = torch.tensor([-1.0 - math.log(ratio) for ratio in ratios])
    return LossInputs(
        logprobs=logprobs,
        proximal_logprobs=old,
        sampler_logprobs=old,
        ref_logprobs=None,
        entropy=torch.ones(count),
        advantages=torch.tensor(advantages),
        weights=torch.full((count,), 1.0 / count),
        sample_index=torch.tensor(list(samples) if samples is not None else [0] * count),
        staleness=torch.zeros(count, dtype=torch.int64),
    )


def token_batch(
    sampler_logprobs: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor, **more: Any
) -> MicroBatch:
    """As much of a micro-batch as an objective looks at: tokens of one sample and of staleness 1, unless `more` says otherwise."""
    count = len(sampler_logprobs)
    zeros = torch.zeros(1, count, dtype=torch.int64)
    fields: dict[str, Any] = {
        "source_index": zeros[0], "target_ids": zeros[0], "sample_index": zeros[0], "staleness": zeros[0] + 1, **more,
    }  # fmt: skip
    return MicroBatch(
        input_ids=zeros,
        position_ids=zeros,
        segments=[Segment(count)],
        sampler_logprobs=sampler_logprobs,
        advantages=advantages,
        weights=weights,
        **fields,
    )
