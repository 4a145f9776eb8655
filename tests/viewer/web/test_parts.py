"""The pure parts of the report: curves, plots, configurations."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.public import shown_config
from grpo_async.findings import RunHistory
from grpo_async.tracking.evaluation_record import EvaluationRecord
from grpo_async.viewer.web.plots import CHAPTERS, Curve, curve, draw_all


def _rows(name: str, *values: float | None) -> list[dict[str, float]]:
    return [
        {"step": float(step), **({} if value is None else {name: value})} for step, value in enumerate(values, start=1)
    ]


def _draw(name: str, *runs: RunHistory) -> list[dict[str, Any]]:
    """The curves of a plot."""
    plot = next(plot for chapter in CHAPTERS.values() for plot in chapter if plot.name == name)
    (drawing,) = draw_all([plot], dict(zip("ab", runs, strict=False)))
    return drawing["options"]["series"]


def test_a_short_curve_has_every_step_and_a_long_one_keeps_its_extremes() -> None:
    assert curve(_rows("entropy", 1.0, None, 3.0), "entropy") == Curve(steps=[1.0, 2.0, 3.0], values=[1.0, None, 3.0])
    assert curve(_rows("entropy", 1.0), "kl") is None
    assert curve(_rows("entropy", 1.0, 3.0, 2.0, 2.0, 5.0, 7.0), "entropy", max_points=3) == Curve(
        steps=[2.0, 4.0, 6.0],
        values=[2.0, 2.0, 6.0],  # (1 + 3) / 2, (2 + 2) / 2, (5 + 7) / 2
        low=[1.0, 2.0, 5.0],
        high=[3.0, 2.0, 7.0],
    )


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("async/staleness_max", [3.0, 2.0]),
        ("ledger/groups/trained", [3.0, 0.0]),
        ("training/skipped_updates", [2.0, 1.0]),  # of a step
    ],
)
def test_a_long_curve_is_reduced_as_its_metric_asks(name: str, values: list[float]) -> None:
    found = curve(_rows(name, 1.0, 3.0, 2.0, 0.0), name, max_points=2)
    assert found is not None
    assert list(found.values) == values


def test_a_reward_has_a_band_of_its_quantiles_and_a_held_out_one_of_its_standard_error() -> None:
    rows = [{"step": 1.0, "reward": 0.5, "reward_min": 0.0, "reward_p10": 0.125, "reward_p90": 0.75, "reward_max": 1.0}]
    series = _draw("reward", RunHistory(metrics=rows))
    assert [each["label"] for each in series] == ["mean", "lowest", "highest"]
    assert series[0]["band"] == [[0.125], [0.75]]
    evaluation = EvaluationRecord(step=5, metrics={"reward": 0.5, "reward_stderr": 0.125})
    assert _draw("held-out", RunHistory(evaluations=[evaluation]))[0]["band"] == [[0.375], [0.625]]
    several = _draw("reward", *[RunHistory(metrics=rows)] * 2)
    assert not any("band" in each for each in several), "they would hide each other"


def test_what_may_be_secret_is_not_shown() -> None:
    """What users' code gets: tests/config/test_keys.py."""
    inference = {"urls": ["http://secret@10.0.0.1"], "host": "10.0.0.1", "replicas": 2, "engine": "vllm"}
    shown = shown_config({"inference": inference, "launch": {"slurm": {"account": "hidden", "server_nodes": 1}}})
    assert shown["inference"] == {"urls": ["..."], "host": "...", "replicas": 2, "engine": "vllm"}
    assert shown["launch"] == {"slurm": {"account": "...", "server_nodes": 1}}


def test_the_vendored_library_is_what_its_note_says() -> None:
    script = Path(__file__).parents[3] / "scripts" / "update-uplot"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
