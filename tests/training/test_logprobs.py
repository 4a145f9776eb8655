"""Chunked log-probabilities against full logits."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from grpo_async.training.logprobs import chunked_logprobs


@pytest.mark.parametrize("chunk_tokens", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_those_of_full_logits(chunk_tokens: int, temperature: float) -> None:
    torch.manual_seed(0)
    head = nn.Linear(8, 50, bias=False)
    hidden = torch.randn(7, 8, requires_grad=True)
    targets = torch.randint(0, 50, (7,))
    weight = torch.randn(7)

    full = torch.log_softmax(head(hidden) / temperature, dim=-1)
    expected = full.gather(-1, targets[:, None]).squeeze(-1)
    expected_gradients = torch.autograd.grad((expected * weight).sum(), [hidden, head.weight])
    logprobs, entropy = chunked_logprobs(hidden, targets, head, temperature=temperature, chunk_tokens=chunk_tokens)
    gradients = torch.autograd.grad((logprobs * weight).sum(), [hidden, head.weight])

    torch.testing.assert_close(logprobs, expected)
    torch.testing.assert_close(entropy, -(full.exp() * full).sum(-1).detach())
    for gradient, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, wanted)
