"""A user's own loss: what is checked at the start, and at every call."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from grpo_async.config.sections import CustomLoss
from grpo_async.errors import RunError
from grpo_async.training.loss import LossInputs, UserLoss
from tests.support.loss_inputs import make_inputs


def reinforce(inputs: LossInputs, *, scale: float = 1.0) -> torch.Tensor:
    return -scale * inputs.advantages * inputs.logprobs


def returns_a_number(inputs: LossInputs) -> Any:
    return inputs.logprobs.sum().item()


def returns_the_mean(inputs: LossInputs) -> torch.Tensor:
    return inputs.logprobs.mean()


def forgets_the_gradient(inputs: LossInputs) -> torch.Tensor:
    return inputs.logprobs.detach() * inputs.advantages


tripled = functools.partial(reinforce, scale=3.0)


def _load(name: str, **arguments: Any) -> UserLoss:
    return UserLoss(CustomLoss(type="custom", function=f"{__name__}:{name}", arguments=arguments))


def test_a_loss_gets_the_inputs_and_its_arguments() -> None:
    inputs = make_inputs([1.5, 0.5], [2.0, -1.0])  # logprobs are -1
    assert _load("reinforce", scale=2.0)(inputs).loss.tolist() == [4.0, -2.0]  # -2 x A x -1
    assert _load("tripled")(inputs).loss.tolist() == [6.0, -3.0]
    assert _load("reinforce")(inputs).ratio.tolist() == pytest.approx([1.5, 0.5])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("returns_a_number", "returned a float"),
        ("returns_the_mean", r"shape \(\)"),
        ("forgets_the_gradient", "without gradient"),
    ],
)
def test_a_result_that_cannot_be_used_is_explained(name: str, words: str) -> None:
    with pytest.raises(RunError, match=words):
        _load(name)(make_inputs([1.0, 1.0], [1.0, 1.0]))
