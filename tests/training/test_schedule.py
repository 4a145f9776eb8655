"""The learning rate over a run, against transformers' own schedules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.optimization import get_scheduler

from grpo_async.errors import ConfigError
from grpo_async.training.optimizer import lr_factors
from tests.trainer.fakes import loop_config

STEPS, WARMUP, LR = 12, 3, 2e-4


def _factors(**optimizer: Any) -> list[float]:
    config = loop_config(optimizer={"lr": LR, **optimizer}, training={"max_steps": STEPS})
    factor = lr_factors(config)
    return [factor(step) for step in range(STEPS)]


@pytest.mark.parametrize(
    ("schedule", "arguments"),
    [
        ("linear", {}),
        ("cosine", {}),
        ("cosine_with_restarts", {"num_cycles": 3}),
        ("polynomial", {"power": 2.0, "lr_end": 1e-5}),
        ("inverse_sqrt", {"timescale": 5}),
        ("warmup_stable_decay", {"num_decay_steps": 4, "decay_type": "linear"}),
    ],
)
def test_a_schedule_is_that_of_transformers_behind_its_warm_up(schedule: str, arguments: dict[str, Any]) -> None:
    """Theirs begins at 0, ours with the first step above it: (step + 1) / 3."""
    for warmup in (0, WARMUP):
        known = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=LR)
        theirs: Any = get_scheduler(
            schedule,
            known,
            num_warmup_steps=warmup,
            num_training_steps=STEPS,
            scheduler_specific_kwargs=arguments or None,
        )
        expected = [theirs.lr_lambdas[0](step) for step in range(STEPS)]
        found = _factors(schedule=schedule, schedule_kwargs=arguments, warmup_steps=warmup)
        assert found[:warmup] == pytest.approx([1 / 3, 2 / 3, 1.0][:warmup])
        assert found[warmup:] == pytest.approx(expected[warmup:], abs=1e-12)


def test_a_floor_is_where_a_schedule_ends() -> None:
    """Nine steps behind the warmup: the last one is at 8/9 of the way."""
    assert _factors(schedule="linear", min_lr_ratio=0.1, warmup_steps=3)[-1] == pytest.approx(1 - 0.9 * 8 / 9)
    assert _factors(schedule="polynomial", min_lr_ratio=0.1)[-1] == pytest.approx(1 - 0.9 * 11 / 12)
    decay = {"num_decay_steps": 2, "decay_type": "linear"}
    stable = _factors(schedule="warmup_stable_decay", min_lr_ratio=0.2, schedule_kwargs=decay)
    assert stable == pytest.approx([1.0] * 11 + [0.6])
    assert _factors(schedule="cosine", min_lr_ratio=0.5)[6] == pytest.approx(0.75)


@pytest.mark.parametrize("schedule", ["constant", "linear"])
def test_a_run_that_is_shorter_than_its_warm_up_ends_with_it(schedule: str) -> None:
    factors = _factors(schedule=schedule, warmup_steps=STEPS + 8)
    assert factors == pytest.approx([(step + 1) / STEPS for step in range(STEPS)])


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.schedule_kwargs: polynomial .*nonsense"):
        _factors(schedule="polynomial", schedule_kwargs={"nonsense": 1})
    with pytest.raises(ConfigError, match=r"schedule_kwargs: constant takes none; set optimizer\.schedule"):
        _factors(schedule_kwargs={"num_cycles": 2})
    with pytest.raises(ConfigError, match=r"warmup_stable_decay .*num_decay_steps"):
        _factors(schedule="warmup_stable_decay")
