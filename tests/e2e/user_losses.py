"""Losses of a user, some of them faulty."""

from __future__ import annotations

import math
import threading
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


def blocks_the_main_thread(inputs: LossInputs, *, first_call: int) -> torch.Tensor:
    """Waits for a lock that nobody gives back, as in a collective that another rank never joins."""
    global _calls
    _calls += 1
    if _calls >= first_call:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    return reinforce(inputs)
