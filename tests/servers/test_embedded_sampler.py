"""The sampler of the embedded engine: distribution, filters, independence of the batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from grpo_async.inference.api import GenerateRequest
from grpo_async.inference.sampling import find_stop
from grpo_async.servers.embedded.sampler import SamplingBatch, sample

CPU = torch.device("cpu")


def _batch(
    *settings: dict[str, float], vocab_size: int = 4, tokens: Sequence[Sequence[int]] | None = None
) -> SamplingBatch:
    requests = [
        GenerateRequest(request_id="r", token_ids=[0], max_tokens=1, **{"temperature": 1.0, **fields})
        for fields in settings
    ]
    tokens = tokens or [[0]] * len(requests)
    return SamplingBatch.of(requests, tokens=tokens, vocab_size=vocab_size, device=CPU)


def _chi_squared(tokens: torch.Tensor, expected: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(expected)).double()
    wanted = expected.double() * len(tokens)
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_tokens_follow_the_tempered_distribution_over_seeds_and_over_positions(vary: str) -> None:
    num_draws = 20_000
    logits = torch.tensor([0.0, 1.0, -1.0, 2.0, 0.5, -3.0, 1.5, 0.2])
    seeds = range(num_draws) if vary == "seed" else [7] * num_draws
    batch = _batch(*[{"seed": seed, "temperature": 0.7} for seed in seeds], vocab_size=8)
    positions = np.arange(num_draws, dtype=np.uint64) if vary == "position" else np.full(num_draws, 5, dtype=np.uint64)
    tokens, logprobs, _ = sample(logits.expand(num_draws, -1), batch, positions)
    expected = (logits / 0.7).softmax(-1)
    assert _chi_squared(tokens, expected) < 29.9  # 7 degrees of freedom, one in 10 000 draws lies above
    assert torch.allclose(logprobs, expected.log()[tokens], atol=1e-6)


def test_a_row_draws_the_same_beside_rows_with_other_settings() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 50, generator=generator)
    settings = [
        {"seed": 3, "temperature": 1.0},
        {"seed": 4, "temperature": 0.0, "top_k": 1, "top_p": 0.1},
        {"seed": 5, "temperature": 0.5, "top_p": 0.9},
        {"seed": -6, "temperature": 1.3, "top_k": 10**30},
        {"seed": 2**70, "temperature": 1.0, "min_p": 0.1, "repetition_penalty": 1.5},
    ]
    positions = np.array([4, 5, 6, 7, 8], dtype=np.uint64)
    tokens, logprobs, _ = sample(logits, _batch(*settings, vocab_size=50), positions)
    for row, fields in enumerate(settings):
        alone, logprob, _ = sample(logits[row : row + 1], _batch(fields, vocab_size=50), positions[row : row + 1])
        assert alone.item() == tokens[row].item()
        assert logprob.item() == pytest.approx(logprobs[row].item(), abs=1e-6)


def test_of_several_strings_the_one_that_ends_first_counts() -> None:
    assert find_stop("ab\nQ: c", ["c", "\nQ:", "b\n"]) == (1, 3)
    assert find_stop("abc", ["bc", "c"]) == (1, 3)  # they end together: the one named first
    assert find_stop("abc", ["x"]) is None
