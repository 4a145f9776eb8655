"""What the comparison with TRL (test_losses_trl) does not show of the losses: numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from grpo_async.training.loss import (
    clipped_loss,
    gspo_loss,
    log_linear_logprobs,
    sapo_loss,
)
from tests.support.loss_inputs import make_inputs


def test_the_log_linear_policy_moves_to_the_trained_one_with_age_and_has_no_gradient() -> None:
    """smp = -2, pi = -1: d = 0 -> -2; d = 1 -> a = 1/2: -1.5; d = 3 -> a = 3/4: -1.25."""
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    result = log_linear_logprobs(logprobs, torch.full((3,), -2.0), torch.tensor([0, 1, 3]))
    assert result.tolist() == [-2.0, -1.5, -1.25]
    assert not result.requires_grad


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss", ["clipped", "gspo", "sapo"])
def test_a_ratio_beyond_all_numbers_leaves_the_gradient_of_the_other_tokens_whole(loss: str, advantage: float) -> None:
    """A placeholder of -9999 as the sampler's logprob: exp overflows, and 0 x inf would be NaN in the backward pass."""
    inputs = make_inputs([1.1, 1.0], [advantage, advantage], samples=[0, 1])
    inputs = replace(inputs, proximal_logprobs=torch.tensor([inputs.proximal_logprobs[0].item(), -9999.0]))
    result = {
        "clipped": lambda: clipped_loss(inputs, epsilon=0.2, epsilon_high=0.28),
        "gspo": lambda: gspo_loss(inputs, epsilon=0.2, epsilon_high=0.28),
        "sapo": lambda: sapo_loss(inputs, temperature_positive=1.0, temperature_negative=1.05),
    }[loss]()
    masked = result.loss.masked_fill(torch.tensor([False, True]), 0.0)  # as the correction does
    masked.sum().backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad[0].isfinite()
    assert inputs.logprobs.grad[0] != 0.0
    assert inputs.logprobs.grad[1] == 0.0
