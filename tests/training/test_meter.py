"""Pipeline figures by hand."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from grpo_async.training.metrics import CounterSnapshot, PipelineMeter, Totals


def _reading(time_s: float, busy_s: float, tokens: int) -> CounterSnapshot:
    return CounterSnapshot(time_s=time_s, generation_busy_s=busy_s, generated_tokens=tokens)


def _meter(first: CounterSnapshot, totals: Totals | None = None) -> PipelineMeter:
    meter = PipelineMeter(totals)
    meter.begin(first)
    return meter


def _two_steps() -> tuple[PipelineMeter, dict[str, float]]:
    """Steps of 4 s and 2 s: waited 1 s and 0.5 s, generated 2 s and 2 s."""
    meter = _meter(_reading(10.0, 5.0, 100))
    first_spent = {"waiting": 1.0, "pushing": 0.5, "training": 2.25}
    first = meter.step(
        _reading(14.0, 7.0, 500),
        trained_tokens=200,
        staleness={0: 1, 1: 2},
        reward=0.2,
        spent=first_spent,
    )
    meter.step(
        _reading(16.0, 9.0, 700),
        trained_tokens=100,
        staleness={2: 1},
        reward=0.6,
        spent={"waiting": 0.5, "training": 1.0, "checkpoint": 0.5},
    )
    return meter, first


def test_the_figures_of_a_step() -> None:
    """R1.6, R1.12: tokens and waits of the step's own seconds."""
    _, metrics = _two_steps()
    assert metrics == pytest.approx(
        {
            "step_time": 4.0,
            "pipeline/trainer_idle_ratio": 0.25,  # 1 / 4
            "pipeline/generator_idle_ratio": 0.5,  # 1 - 2 / 4
            "pipeline/overlap_efficiency": 0.75,  # max(2, 4 - 1) / 4
            "perf/trained_tokens_per_s": 50.0,
            "perf/generated_tokens_per_s": 100.0,
            "async/staleness_mean": 2 / 3,
            "async/staleness_max": 1.0,
            "async/staleness/0": 1 / 3,
            "async/staleness/1": 2 / 3,
            "pipeline/training_fraction": 0.5625,  # 2.25 / 4
            "pipeline/pushing_fraction": 0.125,
            "pipeline/checkpoint_fraction": 0.0,
            "pipeline/other_fraction": 0.0625,  # 4 - 3.75 = 0.25 s
        }
    )


def test_the_figures_of_the_run_are_over_all_steps_and_survive_a_resume() -> None:
    meter, _ = _two_steps()
    resumed = _meter(_reading(0.0, 0.0, 0), Totals(**asdict(meter.totals)))
    for summary in (meter.summary(), resumed.summary()):
        assert summary["wall_s"] == 6.0
        assert summary["trainer_idle_ratio"] == pytest.approx(1.5 / 6)
        assert summary["generator_idle_ratio"] == pytest.approx(2 / 6)  # 1 - 4 / 6
        assert summary["trained_tokens_per_s"] == pytest.approx(50.0)
        assert summary["staleness_mean"] == pytest.approx(4 / 300)  # the step's tokens are what was trained: 300
        assert summary["staleness_max"] == 2.0
        assert summary["reward_first"] == pytest.approx(0.4)
        assert summary["training_fraction"] == pytest.approx(3.25 / 6)
        assert summary["checkpoint_fraction"] == pytest.approx(0.5 / 6)
        assert summary["other_fraction"] == pytest.approx(0.25 / 6)


def test_a_reading_that_falls_back_is_not_counted_twice_and_clocks_that_differ_make_no_more_than_a_whole() -> None:
    """Tokens of an evaluation are taken off when its rollout function says how many they were: late. What was spent is read a
    moment after the wall time: 4.1 s of 4 s."""
    meter = _meter(_reading(0.0, 0.0, 0))
    for time_s, tokens in ((1.0, 1000), (2.0, 5000), (3.0, 2000), (4.0, 3000), (5.0, 6000)):
        meter.step(_reading(time_s, 0.0, tokens), trained_tokens=0, staleness={}, reward=None, spent={})
    assert meter.totals.generated_tokens == 6000
    spent = {"waiting": 1.0, "training": 3.1}
    line = meter.step(_reading(9.0, 0.0, 0), trained_tokens=0, staleness={}, reward=None, spent=spent)
    parts = [value for name, value in line.items() if name.endswith("_fraction")]
    assert sum(parts) + line["pipeline/trainer_idle_ratio"] == pytest.approx(1.0)
    assert line["pipeline/training_fraction"] == pytest.approx(3.1 / 4.1)
