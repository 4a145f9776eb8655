"""The sampler of the embedded engine: its distribution. Filters: tests/servers/contract.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.sampling import find_stop
from grpo_async.servers.embedded.sampler import SamplingBatch, sample


def _chi_squared(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    wanted = expected.double() * len(tokens)
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_tokens_follow_the_tempered_distribution_over_seeds_and_over_positions(vary: str) -> None:
    num_draws = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.2])
    seeds = range(num_draws) if vary == "seed" else [7] * num_draws
    common: dict[str, Any] = {"request_id": "r", "token_ids": [0], "max_tokens": 1, "temperature": 0.7}
    requests = [GenerateRequest(seed=seed, **common) for seed in seeds]
    batch = SamplingBatch.of(requests, tokens=[[0]] * num_draws, vocab_size=8, device=torch.device("cpu"))
    positions = np.arange(num_draws, dtype=np.uint64) if vary == "position" else np.full(num_draws, 5, dtype=np.uint64)
    tokens, logprobs, _ = sample(logits.expand(num_draws, -1), batch, positions)
    expected = (logits / 0.7).softmax(-1)
    assert _chi_squared(tokens, expected) < 29.9  # 7 degrees of freedom, one in 10 000 draws lies above
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


def test_of_several_strings_the_one_that_ends_first_counts() -> None:
    assert find_stop("ab\nQ: c", ["c", "\nQ:", "b\n"]) == (1, 3)
    assert find_stop("abc", ["bc", "c"]) == (1, 3)  # they end together: the one named first
    assert find_stop("abc", ["x"]) is None
