"""The objective: what the comparison with TRL (test_losses_trl) does not show. Numbers worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from grpo_async.batching.pack import MicroBatch
from grpo_async.config.sections import CustomLoss
from grpo_async.errors import RunError
from grpo_async.training.logprobs import PolicyOutput
from grpo_async.training.loss import (
    LossInputs,
    Objective,
    ObjectiveOutput,
    TokenLoss,
    UserLoss,
    _policy_loss,
    dppo_loss,
    is_on_policy,
    log_linear_logprobs,
)
from tests.support.loss_inputs import loss_section, make_inputs, token_batch


def _batch(
    sampler: list[float], advantages: list[float], *, samples: list[int] | None = None, minibatch_tokens: int = 4
) -> MicroBatch:
    """Tokens with weight 1/4 each, and of staleness 1."""
    count = len(sampler)
    known = {"sample_index": torch.tensor(samples or [0] * count), "minibatch_tokens": minibatch_tokens}
    return token_batch(torch.tensor(sampler), torch.tensor(advantages), torch.full((count,), 0.25), **known)


def _policy(logprobs: list[float], *, entropy: list[float] | None = None) -> PolicyOutput:
    return PolicyOutput(
        logprobs=torch.tensor(logprobs, requires_grad=True),
        entropy=torch.tensor(entropy or [1.0] * len(logprobs), requires_grad=True),
    )


def _gradient(output: ObjectiveOutput, tensor: torch.Tensor) -> list[float]:
    (gradient,) = torch.autograd.grad(output.total, tensor)
    return gradient.tolist()


def test_the_proximal_policy_is_the_sampler_the_start_of_the_step_or_between() -> None:
    """pi = -1, sampler -2, d = 1; at the start of the step it was -1.25. The ratio is e^1, e^0, e^0.25, e^0.5 (a = 1/2)."""
    start = torch.tensor([-1.25])
    cases: list[tuple[dict[str, Any], int, torch.Tensor | None, float]] = [
        ({"proximal": "sampler"}, 1, None, 1.0),
        ({"proximal": "recomputed"}, 1, None, 0.0),
        ({"proximal": "recomputed"}, 2, start, 0.25),
        ({"proximal": "log_linear"}, 1, None, 0.5),
    ]
    for values, num_updates, old, log_ratio in cases:
        policy = _policy([-1.0])
        objective = Objective(loss_section(epsilon_high=9.0, **values), num_updates=num_updates)
        output = objective(policy, _batch([-2.0], [2.0]), old=old)
        expected = -2.0 * math.exp(log_ratio) / 4  # -rho A x weight 1/4
        assert output.total.item() == pytest.approx(expected)
        # the proximal policy is a constant: the gradient is that of rho alone
        assert _gradient(output, policy.logprobs) == pytest.approx([expected])


def test_a_loss_that_overflowed_counts_nothing_where_it_is_masked() -> None:
    """Far from the sampler the ratio is infinite. The correction masks the token, and inf x 0 would not be a number."""
    section = loss_section(proximal="log_linear", correction={"level": "token", "action": "mask", "cap": 3.0})
    output = Objective(section)(_policy([-1.0, -1.0]), _batch([-1.0, -300.0], [-2.0, -2.0]))
    assert output.total.item() == pytest.approx(0.5)  # the first token alone: 2 x 1 / 4


_PARTS = slice(0, 1), slice(1, 4)  # cuts the first sample


@pytest.mark.parametrize(
    "values",
    [
        {"type": "dapo", "delta": 4.0}, {"type": "cispo"}, {"type": "sapo"}, {"beta": 0.1, "entropy_bonus": 0.1},
        {"type": "dppo", "epsilon": 0.1},
        {"proximal": "log_linear"}, {"proximal": "recomputed", "correction": {"level": "token"}},
    ],
)  # fmt: skip
def test_a_sum_over_tokens_is_the_sum_of_its_parts_and_so_are_its_gradients(values: dict[str, Any]) -> None:
    objective = Objective(loss_section(**values), num_updates=2)  # two: the old policy counts
    batch = replace(
        _batch([-1.0, -2.0, -0.5, -1.5], [1.0, 1.0, -2.0, -2.0], samples=[0, 0, 1, 1]),
        weights=torch.tensor([0.1, 0.2, 0.3, 0.4]),
        staleness=torch.tensor([0, 1, 2, 3]),
    )
    policy = _policy([-1.3, -1.0, -0.2, -3.0], entropy=[0.5, 1.0, 1.5, 2.0])
    references = torch.tensor([-1.1, -1.2, -1.3, -1.4])
    old = torch.tensor([-1.2, -1.1, -0.3, -2.5])
    known: dict[str, Any] = {"ref_logprobs": references, "old": old}
    total = objective(policy, batch, **known).total
    wanted = torch.autograd.grad(total, [policy.logprobs, policy.entropy], allow_unused=True)
    assert objective.is_per_token
    of = objective.of_tokens(batch, **known)
    together = sum(of(policy.logprobs[rows], policy.entropy[rows], rows) for rows in _PARTS)
    assert isinstance(together, torch.Tensor)
    assert together.item() == pytest.approx(total.item())
    found = torch.autograd.grad(together, [policy.logprobs, policy.entropy], allow_unused=True)
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    "values",
    [
        {"type": "gspo"},
        {"type": "gmpo"},
        {"type": "vespo"},
        {"type": "dapo", "off_policy_mask": 0.5},
        {"type": "dapo", "geometric_mask": [0.99, 1.01]},
        {"type": "custom", "function": "tests.training.test_objective:reinforce"},
        {"proximal": "recomputed", "correction": {"level": "sequence"}},
    ],
)
def test_what_looks_at_whole_samples_is_no_sum_over_tokens(values: dict[str, Any]) -> None:
    assert not Objective(loss_section(**values)).is_per_token


def test_the_log_linear_policy_moves_to_the_trained_one_with_age_and_has_no_gradient() -> None:
    """smp = -2, pi = -1: d = 0 -> -2; d = 1 -> a = 1/2: -1.5; d = 3 -> a = 3/4: -1.25."""
    logprobs = torch.full((3,), -1.0, requires_grad=True)
    result = log_linear_logprobs(logprobs, torch.full((3,), -2.0), torch.tensor([0, 1, 3]))
    assert result.tolist() == [-2.0, -1.5, -1.25]
    assert not result.requires_grad


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("loss", ["dapo", "gspo", "gmpo", "dppo", "vespo", "sapo"])
def test_a_ratio_beyond_all_numbers_leaves_the_gradient_of_the_other_tokens_whole(loss: str, advantage: float) -> None:
    """A placeholder of -9999 as the sampler's logprob: exp overflows, and 0 x inf would be NaN in the backward pass."""
    inputs = make_inputs([1.0001, 1.0], [advantage, advantage], samples=[0, 1])
    inputs = replace(inputs, proximal_logprobs=torch.tensor([inputs.proximal_logprobs[0].item(), -9999.0]))
    result = _policy_loss(loss_section(type=loss))(inputs)
    masked = result.loss.masked_fill(torch.tensor([False, True]), 0.0)  # as the correction does
    masked.sum().backward()  # type: ignore[no-untyped-call]
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad[0].isfinite()
    assert inputs.logprobs.grad[0] != 0.0
    assert inputs.logprobs.grad[1] == 0.0


def _dppo(
    divergence: str, limit: float, p: list[float], q: list[float], advantages: list[float]
) -> tuple[TokenLoss, Any]:
    inputs = make_inputs([1.0] * len(p), advantages)
    logprobs = torch.tensor(p).log().requires_grad_()
    inputs = replace(inputs, logprobs=logprobs, proximal_logprobs=torch.tensor(q).log())
    result = dppo_loss(inputs, divergence=divergence, epsilon=limit, epsilon_high=limit)
    (gradient,) = torch.autograd.grad(result.loss.sum(), logprobs)
    return result, gradient.tolist()


def test_dppo_leaves_out_what_moved_too_far_in_the_direction_of_its_advantage() -> None:
    """Of the paper's figure: a rare token whose ratio is 5 learns on, a frequent one whose ratio is 1.6 does not."""
    p, q = [0.05, 0.8, 0.8, 0.2, 0.2, 0.45], [0.01, 0.5, 0.5, 0.5, 0.5, 0.5]
    result, gradient = _dppo("tv", 0.2, p, q, [1.0, 1.0, -1.0, -1.0, 1.0, -1.0])
    expected = [-5.0, 0.0, 1.6, 0.0, -0.4, 0.9]  # -(p / q) A
    assert result.loss.tolist() == pytest.approx(expected)
    assert gradient == pytest.approx(expected)  # that of p / q by log p is p / q
    assert result.clipped_high is not None
    assert result.clipped_low is not None
    assert result.clipped_high.tolist() == [False, True, False, False, False, False]
    assert result.clipped_low.tolist() == [False, False, False, True, False, False]


def test_dppo_by_binary_kl() -> None:
    """KL of (0.5, 0.5) and (0.8, 0.2): 0.5 log 0.625 + 0.5 log 2.5 = 0.2231; of (0.01, 0.99) and (0.05, 0.95): 0.0247."""
    for limit, masked in ((0.22, True), (0.23, False)):
        result, _ = _dppo("kl", limit, [0.8, 0.05], [0.5, 0.01], [1.0, 1.0])
        assert result.loss.tolist() == pytest.approx([0.0 if masked else -1.6, -5.0])
    result, _ = _dppo("kl", 0.024, [0.05, 1.0], [0.01, 1.0], [1.0, 1.0])  # and a token that is certain
    assert result.loss.tolist() == pytest.approx([0.0, -1.0])


def test_the_geometric_mask_leaves_out_whole_samples_on_either_side_whatever_their_advantage() -> None:
    """Means of policy - sampler of -0.2, -0.05, 0.15: exp = 0.8187, 0.9512, 1.1618."""
    policy = _policy([-1.3, -1.1, -1.0, -1.1, -0.9, -0.8])
    batch = _batch([-1.0] * 6, [-1.0, -1.0, 1.0, 1.0, 1.0, 1.0], samples=[0, 0, 1, 1, 2, 2])
    output = Objective(loss_section(geometric_mask=[0.9, 1.1]))(policy, batch)
    assert output.is_off_policy is not None
    assert output.is_off_policy.tolist() == [True, True, False, False, True, True]
    assert _gradient(output, policy.logprobs)[:2] == [0.0, 0.0]
    kept = is_on_policy(output.inputs, threshold=0.1, bounds=(0.1, 10.0))
    assert kept.tolist() == [False, False, True, True, True, True]  # OPSM beside it


def test_a_teacher_adds_to_the_advantage_of_each_token_what_it_says_of_the_trained_policy() -> None:
    """A = 1, log pi = -1, teachers with the weights 0.5 and 1.5 that say -3 and -2: A + -4.5 + 2 = -1.5; on policy."""
    batch = _batch([-1.0, -1.0], [1.0, 1.0])
    batch = replace(batch, teacher_logprobs=torch.tensor([-4.5, 0.0]), teacher_weights=torch.tensor([2.0, 0.0]))
    policy = _policy([-1.0, -1.0])
    output = Objective(loss_section())(policy, batch)
    assert _gradient(output, policy.logprobs) == pytest.approx([1.5 / 4, -1.0 / 4])


def reinforce(inputs: LossInputs, *, scale: float = 1.0) -> torch.Tensor:
    return -scale * inputs.advantages * inputs.logprobs


def returns_the_mean(inputs: LossInputs) -> torch.Tensor:
    return inputs.logprobs.mean()


def forgets_the_gradient(inputs: LossInputs) -> torch.Tensor:
    return inputs.logprobs.detach() * inputs.advantages


def _load(name: str, **arguments: Any) -> UserLoss:
    return UserLoss(CustomLoss(type="custom", function=f"{__name__}:{name}", arguments=arguments))


def test_a_loss_gets_the_inputs_and_its_arguments() -> None:
    inputs = make_inputs([1.5, 0.5], [2.0, -1.0])  # logprobs are -1
    assert _load("reinforce", scale=2.0)(inputs).loss.tolist() == [4.0, -2.0]  # -2 x A x -1
    assert _load("reinforce")(inputs).ratio.tolist() == pytest.approx([1.5, 0.5])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("returns_the_mean", r"shape \(\)"),
        ("forgets_the_gradient", "without gradient"),
    ],
)
def test_a_result_that_cannot_be_used_is_explained(name: str, words: str) -> None:
    with pytest.raises(RunError, match=words):
        _load(name)(make_inputs([1.0, 1.0], [1.0, 1.0]))
