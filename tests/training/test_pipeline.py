"""How the time of a run is told apart, by hand, and the FLOPs of a step, as torch counts the operations that it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grpo_async.training.pipeline import CounterSnapshot, PipelineMeter, pipeline_summary, training_flops
from tests.training.tiny_families import build_family


def _reading(time_s: float, busy_s: float, tokens: int) -> CounterSnapshot:
    return CounterSnapshot(time_s=time_s, generation_busy_s=busy_s, generated_tokens=tokens)


def test_the_figures_of_steps_and_of_the_run_over_them() -> None:
    """R1.6, R1.12: steps of 4 s and 2 s: waited 1 s and 0.5 s, generated 2 s and 2 s."""
    meter = PipelineMeter()
    meter.begin(_reading(10.0, 5.0, 100))
    first = meter.step(
        _reading(14.0, 7.0, 500),
        trained_tokens=200,
        staleness={0: 1, 1: 2},
        spent={"waiting": 1.0, "pushing": 0.5, "training": 2.25},
    )
    assert first == pytest.approx(
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
    second = meter.step(
        _reading(16.0, 9.0, 700),
        trained_tokens=100,
        staleness={2: 1},
        spent={"waiting": 0.5, "training": 1.0, "checkpoint": 0.5},
    )
    assert [second[f"async/staleness/{age}"] for age in range(3)] == [0.0, 0.0, 1.0]
    summary = pipeline_summary([{"num_tokens": 3, "reward": 0.2, **first}, {"num_tokens": 1, "reward": 0.6, **second}])
    wanted = {
        "wall_s": 6.0,
        "trained_tokens_per_s": 50.0,
        "trainer_idle_ratio": 1.5 / 6,
        "overlap_efficiency": 4.5 / 6,
        "staleness_mean": 4 / 4,
        "training_fraction": 3.25 / 6,
    }
    assert {name: summary[name] for name in wanted} == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("family", "settings"), [("qwen3", {}), ("gpt2", {}), ("mixtral", {"sliding_window": None})], ids=str
)
def test_the_flops_of_a_step_are_those_that_torch_counts(family: str, settings: dict[str, Any]) -> None:
    """12 tokens, whose logits are all computed, in plain attention, which computes every pair."""
    model: Any = build_family(family, **settings)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(3, 15)[None], use_cache=False).logits.sum().backward()
    assert training_flops(model, 12, 12, 12 * 12) == counter.get_total_flops()
