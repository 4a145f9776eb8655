"""Scoring whole sequences with the trainer's weights, on one rank and on two, without a trace in the training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_async.config.model_sections import ModelSection
from grpo_async.training.load import load_policy
from grpo_async.training.score import score_sequences
from tests.support.ranks import run_on_ranks

SEQUENCES = [[5, 9, 3, 200, 7], [8, 4], list(range(10, 60))]


def test_scores_are_those_of_a_plain_forward_at_temperature_one(tiny_model: Path) -> None:
    """The run's own temperature, 0.5, has no part in them."""
    from transformers import AutoModelForCausalLM

    policy = load_policy(ModelSection(path=str(tiny_model)), temperature=0.5, chunk_tokens=16, max_model_len=128)
    scores = score_sequences(policy, SEQUENCES, device=torch.device("cpu"))
    model = AutoModelForCausalLM.from_pretrained(tiny_model).eval()
    assert [len(score) for score in scores] == [4, 1, 49]
    for sequence, score in zip(SEQUENCES, scores, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([sequence])).logits[0, :-1].float()
        expected = logits.log_softmax(-1).gather(-1, torch.tensor(sequence[1:])[:, None])[:, 0]
        assert score == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_scoring_between_two_steps_changes_nothing_of_the_training(
    tiny_model: Path, tmp_path: Path, num_ranks: int
) -> None:
    with_scores = run_on_ranks(
        "score_between_steps", num_ranks, tmp_path / "with", model=tiny_model, sequences=SEQUENCES
    )
    without = run_on_ranks("score_between_steps", num_ranks, tmp_path / "without", model=tiny_model, sequences=[])
    assert with_scores["weights"] == without["weights"]
    assert with_scores["loss"] == without["loss"]
    before, after = with_scores["scores"]
    assert before["logprobs"] != after["logprobs"], "a step was made between the two"
    policy = load_policy(ModelSection(path=str(tiny_model)), temperature=1.0, chunk_tokens=16, max_model_len=128)
    expected = score_sequences(policy, SEQUENCES, device=torch.device("cpu"))
    for score, right, rounded in zip(before["logprobs"], expected, before["rounded_anew"], strict=True):
        assert score == pytest.approx(right, abs=1e-5)
        assert rounded == pytest.approx(right, abs=0.5), "as bfloat16 would have it"
        assert rounded != pytest.approx(right, abs=1e-4)
