"""Scoring whole sequences with the trainer's weights, and comparing the scores with a server's. On two ranks, after every push:
tests/e2e/test_security.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grpo_async.servers.embedded.engine import score_tokens
from grpo_async.training.verify import (
    TrainerScores,
    coarsest_dtype,
    compare_logprobs,
    probe_sequences,
    score_sequences,
    score_twice,
    verify_limit,
)
from tests.launch.support import make_config
from tests.support.tiny_model import build_tiny_model
from tests.training.tiny_models import load_tiny

SEQUENCES = [[5, 9, 3, 200, 7], [8, 4], list(range(10, 60))]


def test_scores_are_those_of_a_plain_forward_at_temperature_one(tiny_model: Path) -> None:
    """The run's own temperature, 0.5, has no part in them."""
    from transformers import AutoModelForCausalLM

    policy = load_tiny(tiny_model, temperature=0.5)
    scores = score_sequences(policy, SEQUENCES, device=torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    assert [len(score) for score in scores] == [4, 1, 49]
    for sequence, score in zip(SEQUENCES, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([sequence])).logits[0, :-1].float()
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0]
        assert score == pytest.approx(expected.tolist(), abs=1e-4)


def _exchange(model: torch.nn.Module, first: str, second: str) -> None:
    one, other = model.get_parameter(first), model.get_parameter(second)
    kept = one.clone()
    one.copy_(other)
    other.copy_(kept)


MISTAKES: dict[str, Callable[[torch.nn.Module], object]] = {
    "a tensor in the place of another": lambda model: _exchange(
        model, "model.layers.2.mlp.up_proj.weight", "model.layers.3.mlp.up_proj.weight"
    ),
    "rows in another order": lambda model: model.get_parameter("model.layers.2.mlp.down_proj.weight").copy_(
        model.get_parameter("model.layers.2.mlp.down_proj.weight").flip(0)
    ),
    "a norm that was not loaded": lambda model: model.get_parameter("model.layers.2.input_layernorm.weight").zero_(),
}


@pytest.mark.parametrize(("compute", "served"), [("float32", "float32"), ("float32", "bfloat16")])
def test_a_server_that_rounds_otherwise_is_within_the_limit_and_one_with_a_wrong_tensor_is_not(
    tmp_path: Path, compute: str, served: str
) -> None:
    """Six layers of 128, the trainer in one dtype, transformers in another."""
    from transformers import AutoModelForCausalLM

    shape = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "initializer_range": 0.2}
    model_path = build_tiny_model(tmp_path / "deep", **shape)
    policy = load_tiny(model_path, dtype=compute)
    probes = probe_sequences([], vocab_size=200, max_model_len=512)
    config = make_config(tmp_path, model={"compute_dtype": compute}, inference={"engine": "embedded", "dtype": served})
    rounding = getattr(torch, coarsest_dtype(config, []))
    how = {"device": torch.device("cpu"), "compute": getattr(torch, compute), "rounding": rounding}
    trainer = score_twice(policy, probes, **how)
    limit = verify_limit(config, trainer)

    def difference(mistake: Callable[[torch.nn.Module], object]) -> float:
        server = AutoModelForCausalLM.from_pretrained(model_path, dtype=getattr(torch, served)).eval()
        with torch.no_grad():
            mistake(server)
        return compare_logprobs(trainer.logprobs, [score_tokens(server, probe) for probe in probes]).mean

    right = difference(lambda _: None) / limit
    assert right < 1.0
    found = {name: difference(mistake) / limit for name, mistake in MISTAKES.items()}
    assert min(found.values()) > 1.0, found


@pytest.mark.parametrize(("trainer", "server"), [(math.nan, -1.0), (-math.inf, -math.inf), (-1.0, -math.inf)])
def test_what_is_not_finite_is_within_no_limit(trainer: float, server: float) -> None:
    found = compare_logprobs([[-1.0, trainer, -1.0]], [[-1.0, server, -1.0]])
    assert not found.mean <= 1e9
    assert not found.max <= 1e9


@pytest.mark.parametrize(("moved", "limit"), [(1e-6, 1e-3), (0.04, 0.08), (0.2, 0.4), (3.0, 0.5)])
def test_the_limit_follows_from_what_rounding_does_to_the_trainers_own(
    tmp_path: Path, moved: float, limit: float
) -> None:
    scores = TrainerScores(logprobs=[[-1.0, -2.0]], perturbed_logprobs=[[-1.0 - moved, -2.0 + moved]])
    assert verify_limit(make_config(tmp_path), scores) == pytest.approx(limit)
    tolerant = make_config(tmp_path, weights={"verify_tolerance": 0.2})
    assert verify_limit(tolerant, scores) == 0.2
