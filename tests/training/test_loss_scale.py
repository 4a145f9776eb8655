"""The loss scale of float16, against torch's own GradScaler."""

from __future__ import annotations

import torch
from torch import nn

from grpo_async.training.step import LossScale


def _of_torch(steps: list[bool]) -> list[float]:
    """The scale after each step, finite or not."""
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    found = []
    for is_finite in steps:
        parameter.grad = torch.full((1,), 1.0 if is_finite else torch.inf)
        scaler.unscale_(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def test_it_follows_torchs_rule_and_goes_on_from_a_checkpoint() -> None:
    steps = [True, False, False, *[True] * 2001, False, True]
    scale, found = LossScale({}), []
    for number, is_finite in enumerate(steps):
        scale.update([True, is_finite])
        found.append(float(scale.value))
        if number == 1000:
            scale = LossScale(scale.counters)
    assert found == _of_torch(steps)
    for _ in range(40):
        scale.update([False])
    assert scale.value == 1
