"""Numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_async.training.losses import clipped_token_loss


def _loss(ratio: float, advantage: float) -> tuple[float, bool, bool]:
    result = clipped_token_loss(
        torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([advantage]), epsilon=0.2, epsilon_high=0.28
    )
    return result.loss.item(), bool(result.clipped_low), bool(result.clipped_high)


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "low", "high"),
    [
        (1.5, 2.0, -2.56, False, True),  # -min(3.0, 1.28 x 2)
        (1.5, -2.0, 3.0, False, False),  # -min(-3.0, -2.56): a bad token that became likelier is not clipped
        (0.5, 2.0, -1.0, False, False),  # -min(1.0, 0.8 x 2)
        (0.5, -2.0, 1.6, True, False),  # -min(-1.0, 0.8 x -2)
        (1.0, 3.0, -3.0, False, False),
    ],
)
def test_the_clipped_loss_equals_the_formula(
    ratio: float, advantage: float, expected: float, low: bool, high: bool
) -> None:
    loss, clipped_low, clipped_high = _loss(ratio, advantage)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert (clipped_low, clipped_high) == (low, high)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has_minus_ratio_times_advantage() -> None:
    logprobs = torch.log(torch.tensor([1.5, 1.1])).requires_grad_()
    result = clipped_token_loss(logprobs, torch.zeros(2), torch.tensor([2.0, 2.0]), epsilon=0.2, epsilon_high=0.28)
    result.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -2.2])  # d(-rho A)/d logp = -1.1 x 2
