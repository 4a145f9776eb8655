"""Policy losses, their gradients and the functions around them: numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from grpo_async.config.loss_sections import ImportanceSamplingSection
from grpo_async.training.loss import (
    LossInputs,
    TokenLoss,
    cispo_loss,
    clipped_loss,
    entropy_threshold,
    gspo_loss,
    importance_weights,
    is_on_policy,
    kl_k3,
    log_linear_logprobs,
    sapo_loss,
)
from tests.support.loss_inputs import make_inputs


def _gradient(result: TokenLoss, inputs: LossInputs) -> list[float]:
    result.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs.grad is not None
    return inputs.logprobs.grad.tolist()


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
    result = clipped_loss(make_inputs([ratio], [advantage]), epsilon=0.2, epsilon_high=0.28)
    assert result.loss.item() == pytest.approx(expected, abs=1e-5)
    assert (bool(result.clipped_low), bool(result.clipped_high)) == (low, high)


def test_delta_bounds_the_loss_of_a_bad_token_that_became_much_likelier() -> None:
    """rho = 5, A = -2: -min(-10, -2.56) = 10 with the gradient 10; delta 4: -min(-8, -2.56) = 8, and no gradient."""
    inputs = make_inputs([5.0, 5.0], [-2.0, -2.0])
    unbounded = clipped_loss(inputs, epsilon=0.2, epsilon_high=0.28)
    assert unbounded.loss.tolist() == pytest.approx([10.0, 10.0])
    bounded = clipped_loss(inputs, epsilon=0.2, epsilon_high=0.28, delta=4.0)
    assert bounded.loss.tolist() == pytest.approx([8.0, 8.0])
    assert bounded.is_capped is not None
    assert bounded.is_capped.tolist() == [True, True], "a token without gradient would look as if it had one"
    assert bounded.clipped_high is not None
    assert not bounded.clipped_high.any(), "TRL does not count them"
    assert _gradient(bounded, inputs) == [0.0, 0.0]


def test_gspo_takes_the_geometric_mean_ratio_of_each_sample() -> None:
    """Sample 0: log ratios 0.1 and 0.3, s = exp(0.2) = 1.2214, A = 2, clipped at 1.0004 x 2; sample 1: s = 0.5, A = 2: 1."""
    inputs = make_inputs([math.exp(0.1), math.exp(0.3), 0.5], [2.0, 2.0, 2.0], samples=[0, 0, 1])
    result = gspo_loss(inputs, epsilon=3e-4, epsilon_high=4e-4)
    assert result.loss.tolist() == pytest.approx([-2.0008, -2.0008, -1.0])
    assert result.ratio.tolist() == pytest.approx([math.exp(0.2), math.exp(0.2), 0.5])
    assert result.clipped_high is not None
    assert result.clipped_high.tolist() == [True, True, False]
    assert result.is_per_sequence


def test_cispo_caps_the_ratio_and_keeps_the_gradient_of_every_token() -> None:
    """rho 7 capped at 5: loss -5 x 2 x -1 = 10, gradient -10; rho 3: -3 x -2 x -1 = -6, gradient 6."""
    inputs = make_inputs([7.0, 3.0, 7.0], [2.0, -2.0, -2.0])
    result = cispo_loss(inputs, epsilon_high=5.0)
    assert result.loss.tolist() == pytest.approx([10.0, -6.0, -10.0])
    assert result.ratio.tolist() == pytest.approx([5.0, 3.0, 5.0])
    assert result.clipped_high is not None
    assert result.clipped_high.tolist() == [True, False, False]  # as TRL: capped and A > 0
    assert _gradient(result, inputs) == pytest.approx([-10.0, 6.0, 10.0])


def test_sapo_gates_softly_by_the_sign_of_the_advantage() -> None:
    """rho = 1: -A 0.5 x 4 / tau: -4 for A = 2, tau = 1; 4 / 1.05 = 3.8095 for A = -2. rho = 2: sigmoid(1) = 0.731059: -5.848469;
    sigmoid(1.05) = 0.740775, x 4 / 1.05 x 2 = 5.644000. The gradient at rho = 1 is -A: sigmoid' = 1/4, x 4 / tau x tau."""
    inputs = make_inputs([1.0, 1.0, 2.0, 2.0], [2.0, -2.0, 2.0, -2.0])
    result = sapo_loss(inputs, temperature_positive=1.0, temperature_negative=1.05)
    assert result.loss.tolist() == pytest.approx([-4.0, 3.8095238, -5.848469, 5.644], rel=1e-5)
    assert _gradient(result, inputs)[:2] == pytest.approx([-2.0, 2.0])


def test_the_log_linear_policy_moves_to_the_trained_one_with_age_and_has_no_gradient() -> None:
    """smp = -2, pi = -1: d = 0 -> -2; d = 1 -> a = 1/2: -1.5; d = 3 -> a = 3/4: -1.25."""
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    result = log_linear_logprobs(logprobs, torch.full((3,), -2.0), torch.tensor([0, 1, 3]))
    assert result.tolist() == [-2.0, -1.5, -1.25]
    assert not result.requires_grad


# exp(0.5) = 1.64872, exp(1.0) = 2.71828, exp(-0.2) = 0.81873, exp(1.5) = 4.48169
@pytest.mark.parametrize(
    ("level", "action", "cap", "floor", "expected"),
    [
        ("token", "none", 3.0, None, [1.64872, 2.71828, 0.81873]),
        ("token", "truncate", 2.0, None, [1.64872, 2.0, 0.81873]),
        ("token", "truncate", 2.0, 1.0, [1.64872, 2.0, 1.0]),
        ("token", "mask", 2.0, None, [1.64872, 0.0, 0.81873]),
        ("token", "mask", 2.0, 0.9, [1.64872, 0.0, 0.0]),
        ("sequence", "none", 3.0, None, [4.48169, 4.48169, 0.81873]),
        ("sequence", "truncate", 3.0, 0.9, [3.0, 3.0, 0.9]),
        ("sequence", "mask", 3.0, None, [0.0, 0.0, 0.81873]),
        ("sequence", "mask", 5.0, 0.9, [4.48169, 4.48169, 0.0]),
    ],
)
def test_correction_weights_equal_the_formula(
    level: str, action: str, cap: float, floor: float | None, expected: list[float]
) -> None:
    inputs = replace(
        make_inputs([1.0] * 3, [1.0] * 3, samples=[0, 0, 1]),
        old_logprobs=torch.tensor([-0.5, -1.0, -1.2], requires_grad=True),
        sampler_logprobs=torch.tensor([-1.0, -2.0, -1.0]),
    )
    section = ImportanceSamplingSection.model_validate({"level": level, "action": action, "cap": cap, "floor": floor})
    weights, is_masked = importance_weights(inputs, section)
    assert weights.tolist() == pytest.approx(expected, abs=1e-4)
    assert not weights.requires_grad
    assert (None if is_masked is None else is_masked.tolist()) == (
        [value == 0.0 for value in expected] if action == "mask" else None
    )


def test_only_bad_completions_that_drifted_are_left_out() -> None:
    """sampler - logprob: means 0.2, 0.05, 0.2; the last has A > 0. At the threshold itself a sample is kept."""
    inputs = replace(
        make_inputs([1.0] * 5, [-1.0, -1.0, -1.0, -1.0, 1.0], samples=[0, 0, 1, 1, 2]),
        logprobs=torch.zeros(5),
        sampler_logprobs=torch.tensor([0.3, 0.1, 0.0, 0.1, 0.2]),
    )
    assert is_on_policy(inputs, threshold=0.1).tolist() == [False, False, True, True, True]
    edge = replace(inputs, sampler_logprobs=torch.full((5,), 0.25))
    assert is_on_policy(edge, threshold=0.25).all()


def test_the_entropy_threshold_is_the_quantile() -> None:
    """Index 0.6 x 4 = 2.4: 0.4 + 0.4 x 0.1 = 0.44; of a fraction of 0 the highest entropy is left."""
    entropy = torch.tensor([0.1, 0.2, 0.4, 0.5, 0.9])
    assert entropy_threshold(entropy, fraction=0.4).item() == pytest.approx(0.44)
    assert entropy_threshold(entropy, fraction=0.0).item() == pytest.approx(0.9)
    many = torch.rand(1001).sort().values
    assert entropy_threshold(many, fraction=0.2).item() == pytest.approx(torch.quantile(many, 0.8).item(), rel=1e-5)


def test_k3_and_its_gradient() -> None:
    """ref - logprob = 0.5: e^0.5 - 0.5 - 1 = 0.148721, gradient 1 - e^0.5 = -0.648721; at 0 both are 0."""
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    kl = kl_k3(logprobs, torch.tensor([-0.5, -1.0]))
    assert kl.tolist() == pytest.approx([0.148721, 0.0], abs=1e-6)
    kl.sum().backward()  # type: ignore[no-untyped-call]
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([-0.648721, 0.0], abs=1e-6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss", ["clipped", "gspo", "sapo"])
def test_a_ratio_beyond_all_numbers_leaves_the_gradient_of_the_other_tokens_whole(loss: str, advantage: float) -> None:
    """A placeholder of -9999 as the sampler's logprob: exp overflows, and 0 x inf would be NaN in the backward pass."""
    inputs = make_inputs([1.1, 1.0], [advantage, advantage], samples=[0, 1])
    inputs = replace(inputs, old_logprobs=torch.tensor([inputs.old_logprobs[0].item(), -9999.0]))
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
