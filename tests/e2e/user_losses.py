"""Losses of a user, some of them faulty."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from grpo_async.training.loss import LossInputs

_calls = 0


def reinforce(inputs: LossInputs) -> torch.Tensor:
    return -inputs.advantages * inputs.logprobs


def not_finite(inputs: LossInputs, *, not_a_number: list[int], infinite_from: int) -> torch.Tensor:
    """NaN at the calls that are named, counted from 1, infinite from one on; a step that fits into one micro-batch is one call."""
    global _calls
    _calls += 1
    factor = math.inf if _calls >= infinite_from else math.nan if _calls in not_a_number else 1.0
    return reinforce(inputs) * factor
