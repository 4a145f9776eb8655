"""The norm of all gradients and their scaling, against torch's clip_grad_norm_. Sharded: test_equivalences, test_shard."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from grpo_async.training.step import clip_, square_norm

CPU = torch.device("cpu")


def _parameters(*dtypes: torch.dtype) -> list[nn.Parameter]:
    torch.manual_seed(0)
    parameters = [nn.Parameter(torch.zeros(3, 5, dtype=dtype)) for dtype in dtypes]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    return [*parameters, nn.Parameter(torch.zeros(2))]  # the last one has no gradient


@pytest.mark.parametrize("max_norm", [0.5, 100.0], ids=["clipped", "left"])
def test_norm_and_clipped_gradients_are_those_of_torch(max_norm: float) -> None:
    mine, theirs = (_parameters(torch.float32, torch.float64, torch.float32) for _ in range(2))
    norm = math.sqrt(square_norm(mine, CPU).item())
    assert norm == pytest.approx(nn.utils.clip_grad_norm_(theirs, max_norm).item(), rel=1e-6)
    clip_(mine, norm=norm, max_norm=max_norm)
    for one, other in zip(mine, theirs, strict=True):
        if other.grad is not None:
            torch.testing.assert_close(one.grad, other.grad)


def test_the_norm_of_bfloat16_gradients_is_not_rounded_to_8_bits() -> None:
    """With `model.dtype: bfloat16`; the clip factor and the metric follow from it."""
    parameters = _parameters(*[torch.bfloat16] * 50)
    exact = sum(p.grad.double().square().sum().item() for p in parameters if p.grad is not None)
    assert square_norm(parameters, CPU).item() == pytest.approx(exact, rel=1e-6)


def test_without_gradients_the_norm_is_zero_and_what_is_not_finite_shows_in_it() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    assert square_norm([parameter], CPU).item() == 0.0
    clip_([parameter], norm=0.0, max_norm=1.0)
    parameter.grad = torch.tensor([1.0, math.nan])
    assert math.isnan(square_norm([parameter], CPU).item())
