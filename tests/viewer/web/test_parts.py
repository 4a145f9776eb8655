"""The pure parts of the report: curves, plots, configurations."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.diff import differences, flat
from grpo_async.config.public import shown_config
from grpo_async.findings import RunHistory
from grpo_async.run_directory import RunDir
from grpo_async.tracking.evaluation_record import EvaluationRecord
from grpo_async.viewer.runs import labels_of
from grpo_async.viewer.web.plots import CHAPTERS, Curve, Plot, curve, draw_all
from tests.viewer.support import steps


def _rows(name: str, *values: float | None) -> list[dict[str, float]]:
    return [
        {"step": float(step), **({} if value is None else {name: value})} for step, value in enumerate(values, start=1)
    ]


def _plot(name: str) -> Plot:
    return next(plot for chapter in CHAPTERS.values() for plot in chapter if plot.name == name)


def _draw(name: str, *runs: RunHistory) -> dict[str, Any]:
    """The runs are called a, b, ..."""
    (drawing,) = draw_all([_plot(name)], dict(zip("ab", runs, strict=False)))
    return drawing["options"]


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
        ("completions/min_length", [1.0, 0.0]),
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
    series = _draw("reward", RunHistory(metrics=rows))["series"]
    assert [each["label"] for each in series] == ["mean", "lowest", "highest"]
    assert series[0]["band"] == [[0.125], [0.75]]
    evaluation = EvaluationRecord(step=5, metrics={"reward": 0.5, "reward_stderr": 0.125})
    assert _draw("held-out", RunHistory(evaluations=[evaluation]))["series"][0]["band"] == [[0.375], [0.625]]


def test_several_runs_have_a_color_each_and_only_the_main_lines() -> None:
    drawn = _draw("reward", RunHistory(metrics=steps(3)), RunHistory(metrics=steps(4)))
    assert [(each["label"], each["color"]) for each in drawn["series"]] == [("a", 1), ("b", 2)]
    assert [len(each["x"]) for each in drawn["series"]] == [3, 4]


def test_what_may_be_secret_is_not_shown() -> None:
    shown = shown_config(
        {
            "model": {"path": "m"},
            "rewards": [{"function": "mine:judge", "arguments": {"api_key": "sk-1"}}],
            "tracking": [{"type": "wandb", "entity": "me"}],
            "inference": {"urls": ["http://secret@10.0.0.1"], "host": "10.0.0.1", "replicas": 2, "engine": "vllm"},
            "launch": {"slurm": {"account": "hidden", "server_nodes": 1}, "nodes": 2},
        }
    )
    text = json.dumps(shown)
    assert not any(secret in text for secret in ("sk-1", "entity", "10.0.0.1", "hidden"))
    assert shown["inference"] == {"urls": ["..."], "host": "...", "replicas": 2, "engine": "vllm"}
    assert shown["launch"] == {"slurm": {"account": "...", "server_nodes": 1}, "nodes": 2}


def test_only_settings_that_differ_are_listed_with_their_paths() -> None:
    first = {"run": {"name": "a"}, "optimizer": {"lr": 1e-5, "betas": [0.9, 0.99]}, "rewards": [{"weight": 1.0}]}
    second = {"run": {"name": "b"}, "optimizer": {"lr": 1e-6, "betas": [0.9, 0.99]}, "rewards": []}
    assert flat(first)["optimizer.betas"] == "[0.9, 0.99]"
    found = differences([first, second])
    assert [(each.path, list(each.values)) for each in found] == [
        ("run.name", ["a", "b"]),
        ("optimizer.lr", ["1e-05", "1e-06"]),
        ("rewards.0.weight", ["1.0", "(not set)"]),
        ("rewards", ["(not set)", "[]"]),
    ]
    assert differences([first, first]) == []


def test_runs_of_the_same_name_are_told_apart() -> None:
    for names in (["a", "b"], ["x/a", "y/a", "y/b"], ["x/a/run", "y/a/run"]):
        assert labels_of([RunDir(Path("/runs") / name) for name in names]) == names


def test_the_vendored_library_is_what_its_note_says() -> None:
    script = Path(__file__).parents[3] / "scripts" / "update-uplot"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
