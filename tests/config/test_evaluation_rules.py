"""Evaluation settings that make no sense together are refused with what to change."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from grpo_async.config import ExperimentConfig


def _config(**sections: Any) -> ExperimentConfig:
    base: dict[str, Any] = {
        "run": {"name": "test"},
        "model": {"path": "m"},
        "data": {"train": {"type": "jsonl", "path": "d.jsonl"}, "held_out": 0.1},
        "rewards": [{"function": "a:b"}],
    }
    return ExperimentConfig.model_validate({**base, **sections})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"evaluation": {"samples": 4}}, "evaluation.samples: 4 greedy completions of a prompt are all the same"),
        (
            {"evaluation": {"every_steps": 3}, "training": {"weight_sync_steps": 2}},
            "evaluation.every_steps: 3 is no multiple of training.weight_sync_steps: 2",
        ),
        (
            {
                "evaluation": {"every_steps": 3},
                "inference": {"vllm": {"sleep_while_training": True}},
                "rollout": {"max_staleness": 0},
            },
            "evaluation.every_steps: 3 needs the servers while training goes on",
        ),
        (
            {
                "evaluation": {"samples": 16, "temperature": 1.0},
                "environments": {"maze": {"factory": "a:B", "max_instances": 8}},
            },
            "environments.maze.max_instances: 8 is less than evaluation.samples: 16",
        ),
        ({"checkpoint": {"best_metric": "accuracy"}}, "checkpoint.best_metric: an evaluation has no 'accuracy'"),
        (
            {"checkpoint": {"best_metric": "pass@8"}, "evaluation": {"samples": 4, "temperature": 1.0}},
            "reward, pass@1, pass@2, pass@4",
        ),
        ({"data": {"train": {"type": "jsonl", "path": "x"}, "held_out": 0.1}}, "data.held_out: 0.1 keeps rows back"),
        ({"checkpoint": {"keep_best": 1}}, "checkpoint.keep_best: 1 goes by evaluations during training"),
        (
            {"checkpoint": {"keep_best": 1, "every_steps": 4}, "evaluation": {"every_steps": 6}},
            "make evaluation.every_steps: 6 a multiple of checkpoint.every_steps: 4",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        _config(**sections)
    assert words in str(caught.value)


def test_what_goes_together_is_not() -> None:
    config = _config(
        evaluation={"every_steps": 8, "samples": 4, "temperature": 0.5},
        training={"weight_sync_steps": 2},
        checkpoint={"keep_best": 2, "every_steps": 4},
        rollout={"max_in_flight": 40},
    )
    assert config.evaluation_in_flight == 10
    assert _config(evaluation={"max_in_flight": 3}).evaluation_in_flight == 3
    assert _config(evaluation={}, rollout={"max_in_flight": 2}).evaluation_in_flight == 1
