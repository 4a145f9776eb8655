"""The arithmetic of the benchmarks, by hand."""

from __future__ import annotations

from argparse import Namespace

import pytest

from benchmarks import _models, asynchrony
from benchmarks.report import Report


@pytest.mark.parametrize(
    ("value", "bound", "code"),
    [
        (1.01, {"at_most": 1.0}, 1),
        (0.9, {"at_least": 0.9}, 0),
        (float("nan"), {"at_most": 1.0}, 1),
    ],
)
def test_the_exit_code_says_whether_every_target_is_met(
    value: float, bound: dict[str, float], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("x", Namespace())
    report.target("fine", 1.0, at_most=2.0)
    report.target("ratio", value, **bound)
    assert report.finish() == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("met     fine: 1 (at most 2)")
    assert lines[-1].startswith("MISSED" if code else "met")


SMALL = _models.ModelShape(vocab=10, hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, intermediate=8)


def _line(step: int, wall: float, *, trainer_idle: float, generator_idle: float) -> dict[str, float]:
    return {
        "step": step,
        "step_time": wall,
        "pipeline/trainer_idle_ratio": trainer_idle,
        "pipeline/generator_idle_ratio": generator_idle,
        "pipeline/training_fraction": 0.5,
        "pipeline/pushing_fraction": 0.1,
        "perf/trained_tokens_per_s": 100.0 * step,
        "async/staleness_mean": 1.0,
    }


def test_the_steady_state_is_weighted_by_time() -> None:
    lines = [
        _line(1, 9.0, trainer_idle=0.9, generator_idle=0.0),
        _line(2, 2.0, trainer_idle=0.5, generator_idle=0.25),
        _line(3, 4.0, trainer_idle=0.0, generator_idle=0.375),
        _line(4, 1.0, trainer_idle=0.0, generator_idle=1.0),
    ]
    found = asynchrony.statistics_of(lines, skip=1, last=1)
    expected = {
        "step": 3.0,  # (2 + 4) / 2
        "waiting for samples": 0.5,  # 2 x 0.5 / 2
        "server busy": 2.0,  # (1.5 + 2.5) / 2
        "servers idle": 1 / 3,
        "trainer idle": 1 / 6,
        "overlap efficiency": 5 / 6,  # the trainer's 5 s of 6
        "trained tokens": (200 * 2 + 300 * 4) / 6,
        "training": 1.5,
        "push": 0.3,
        "all steps": 16.0,
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)
