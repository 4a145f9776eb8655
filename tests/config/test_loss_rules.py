"""Combinations of objective and training that make no sense are refused, each with its reason."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from grpo_async.config.experiment import ExperimentConfig


def _problems(**sections: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        _config(**sections)
    return str(caught.value)


def _config(**sections: Any) -> ExperimentConfig:
    """The loader fills the default `type` in; here it is done by hand."""
    sections["loss"] = {"type": "dapo", **sections.get("loss", {})}
    return ExperimentConfig.model_validate(
        {
            "run": {"name": "x"},
            "model": {"path": "m"},
            "data": {"train": {"type": "jsonl", "path": "t"}},
            "rewards": [{"function": "a:b"}],
            **sections,
        }
    )


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"loss": {"correction": {}}}, "with loss.proximal: sampler there is none; set loss.proximal: recomputed"),
        (
            {"loss": {"proximal": "log_linear"}, "rollout": {"max_staleness": 0}},
            "log_linear goes by the age of tokens, and with rollout.max_staleness: 0 all are new",
        ),
        ({"loss": {"proximal": "recomputed"}}, "makes every ratio 1 while training.minibatches is 1"),
        (
            {"loss": {"type": "gspo", "proximal": "recomputed", "correction": {"level": "token"}}},
            "gspo's ratio is the same for all of them; set level: sequence",
        ),
        ({"loss": {"reference": "models/base"}}, "loss.reference: models/base would not be used, since loss.beta is 0"),
        (
            {"training": {"minibatches": 3}, "rollout": {"groups_per_step": 2}},
            "training.minibatches: 3 is more than rollout.groups_per_step: 2",
        ),
        ({"loss": {"type": "grpo", "reduction": "dapo"}}, "is what `type: dapo` means; set that, without reduction"),
        ({"loss": {"delta": 1.2}}, "delta: 1.2 is not more than 1 + epsilon_high = 1.28"),
        ({"loss": {"type": "cispo", "delta": 4.0}}, "delta"),
        ({"loss": {"type": "sapo", "epsilon": 0.2}}, "epsilon"),
        (
            {"loss": {"proximal": "recomputed", "correction": {"cap": 2.0, "floor": 2.0}}},
            "floor: 2.0 is not less than cap: 2.0",
        ),
    ],
)
def test_a_combination_that_makes_no_sense_is_refused_with_its_reason(sections: dict[str, Any], words: str) -> None:
    assert words in _problems(**sections)


@pytest.mark.parametrize(
    "sections",
    [
        {"loss": {"proximal": "recomputed", "correction": {}}},
        {"loss": {"proximal": "recomputed"}, "training": {"minibatches": 2}, "rollout": {"groups_per_step": 2}},
        {"loss": {"type": "custom", "function": "a:b", "proximal": "recomputed"}},
        {"loss": {"proximal": "log_linear", "correction": {"level": "token"}}},
        {"loss": {"type": "gspo", "proximal": "recomputed", "correction": {"level": "sequence"}}},
        {"loss": {"beta": 0.1, "reference": "models/base"}},
        {"loss": {"type": "grpo", "reduction": "grpo"}},
        {"loss": {"delta": 1.29}},
    ],
)
def test_its_neighbours_are_allowed(sections: dict[str, Any]) -> None:
    _config(**sections)


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        ({}, "dapo"),
        ({"type": "grpo"}, "grpo"),
        ({"type": "bnpo"}, "bnpo"),
        ({"type": "dr_grpo"}, "dr_grpo"),
        ({"type": "gspo"}, "grpo"),
        ({"type": "sapo"}, "grpo"),
        ({"type": "cispo"}, "dapo"),
        ({"type": "custom", "function": "a:b"}, "dapo"),
        ({"type": "sapo", "reduction": "dr_grpo"}, "dr_grpo"),
        ({"type": "gspo", "reduction": "dapo"}, "dapo"),
        ({"type": "cispo", "reduction": "grpo"}, "grpo"),
    ],
)
def test_the_reduction_in_use_is_the_types_unless_set(loss: dict[str, Any], reduction: str) -> None:
    assert _config(loss=loss).loss.reduction_in_use == reduction
