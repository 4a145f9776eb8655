"""Comparing log-probabilities of trainer and server: figures worked out by hand, limits, probe sequences."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from grpo_async.training.verify import (
    TrainerScores,
    coarsest_dtype,
    compare_logprobs,
    probe_sequences,
    verify_limit,
)
from tests.launch.support import make_config


def test_the_figures_are_those_of_the_formulas() -> None:
    # d = 0, 0.5, -1
    found = compare_logprobs([[-1.0, -2.0], [-3.0]], [[-1.0, -2.5], [-2.0]])
    assert (found.mean, found.max, found.num_tokens) == pytest.approx((0.5, 1.0, 3))


@pytest.mark.parametrize(("trainer", "server"), [(math.nan, -1.0), (-math.inf, -math.inf), (-1.0, -math.inf)])
def test_what_is_not_finite_is_within_no_limit(trainer: float, server: float) -> None:
    found = compare_logprobs([[-1.0, trainer, -1.0]], [[-1.0, server, -1.0]])
    assert not found.mean <= 1e9
    assert not found.max <= 1e9


def test_the_coarsest_dtype_decides_what_is_rounding(tmp_path: Path) -> None:
    assert coarsest_dtype(make_config(tmp_path), []) == "float32"
    assert coarsest_dtype(make_config(tmp_path), ["float32", "float16"]) == "float16"
    served = make_config(tmp_path, inference={"engine": "embedded", "dtype": "bfloat16"})
    assert coarsest_dtype(served, ["float16"]) == "bfloat16"
    assert coarsest_dtype(make_config(tmp_path, model={"compute_dtype": "bfloat16"}), []) == "bfloat16"
    assert coarsest_dtype(make_config(tmp_path, model={"dtype": "bfloat16"}), []) == "float32"


@pytest.mark.parametrize(("moved", "limit"), [(1e-6, 1e-3), (0.04, 0.08), (0.2, 0.4), (3.0, 0.5)])
def test_the_limit_follows_from_what_rounding_does_to_the_trainers_own(
    tmp_path: Path, moved: float, limit: float
) -> None:
    scores = TrainerScores(logprobs=[[-1.0, -2.0]], perturbed_logprobs=[[-1.0 - moved, -2.0 + moved]])
    assert verify_limit(make_config(tmp_path), scores) == pytest.approx(limit)
    tolerant = make_config(tmp_path, weights={"verify_tolerance": 0.2})
    assert verify_limit(tolerant, scores) == 0.2


def test_probes_begin_with_the_prompts_and_have_three_lengths() -> None:
    prompts = [[7, 8, 9], [4] * 100, [5]]
    probes = probe_sequences(prompts, vocab_size=300, max_model_len=2048)
    assert [len(probe) for probe in probes] == [16, 64, 300]
    assert probes[0][:3] == [7, 8, 9]
    assert probes[1][:32] == [4] * 32
    assert set(probes[1][32:]) != {4}
    assert all(0 <= token < 300 for probe in probes for token in probe)
    assert len(set(probes[2][1:])) > 100  # many rows of the embedding
    assert [len(probe) for probe in probe_sequences([[1]], vocab_size=9, max_model_len=17)] == [16]
