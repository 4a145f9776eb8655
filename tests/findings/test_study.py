"""The verdict of a study: which settings are safe, which to use, and when nothing can be said."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from grpo_async.findings.study import STUDY_FILE, Study, StudyPlan, run_name
from grpo_async.run_directory import RunDir

Outcome = float | str | None
"""Held-out reward, the error of a failed run, or None for one that has not ended."""


def _study(folder: Path, settings: dict[str, tuple[float, Sequence[Outcome]]], own: str | None = None) -> Study:
    """A folder with these runs: by setting its seconds and what each seed came to."""
    num_seeds = max(len(outcomes) for _, outcomes in settings.values())
    plan = StudyPlan(
        config="c.yaml",
        base={},
        axes=["staleness"],
        settings=[([label], []) for label in settings],
        own=None if own is None else [own],
        seeds=list(range(num_seeds)),
        tolerance=0.05,
    )
    (folder / STUDY_FILE).write_text(plan.model_dump_json())
    for label, (seconds, outcomes) in settings.items():
        for seed, outcome in enumerate(outcomes):
            run = RunDir(folder / run_name([label], seed))
            run.root.mkdir()
            if isinstance(outcome, str):
                run.status.write_text(json.dumps({"state": "failed", "error": outcome}))
            elif outcome is not None:
                run.status.write_text(json.dumps({"state": "finished"}))
                summary = {"wall_s": seconds, "staleness_mean": 1.0, "evaluation": {"after": {"reward": outcome}}}
                run.summary.write_text(json.dumps(summary))
    study = Study.read(folder)
    assert study is not None
    return study


def _verdicts(study: Study) -> dict[str, bool | None]:
    return {str(setting): study.is_safe(setting) for setting in study.settings}


def test_safe_is_what_surely_loses_little_and_the_fastest_of_it_is_advised(tmp_path: Path) -> None:
    study = _study(
        tmp_path,
        {
            "best": (60.0, [0.97, 0.98, 0.99, 0.98, 0.98]),
            "as good": (30.0, [0.96, 0.98, 0.98, 0.97, 0.98]),
            "worse": (10.0, [0.80, 0.82, 0.81, 0.83, 0.80]),
            "as good but for one seed": (10.0, [0.98, 0.98, 0.98, 0.98, 0.4]),
            "breaks once": (10.0, [0.98, 0.98, "the loss is not finite", 0.98, 0.98]),
            "still runs": (10.0, [0.999, 0.999, 0.999, 0.999, None]),
        },
        own="worse",
    )
    assert _verdicts(study) == {
        "best": True,
        "as good": True,
        "worse": False,
        "as good but for one seed": False,
        "breaks once": False,
        "still runs": None,
    }
    assert "Use as good" in study.advice()
    assert "(worse) may lose" in study.advice()
    own = next(setting for setting in study.settings if str(setting) == "worse")
    # differences 0.17 0.16 0.18 0.15 0.18: mean 0.168, s 0.01304, t 2.776: 0.168 + 0.0162
    assert study.loss_to_best(own) == pytest.approx(0.1842, abs=0.001)


def test_of_fewer_than_three_seeds_nothing_is_called_safe(tmp_path: Path) -> None:
    study = _study(tmp_path, {"a": (1.0, [0.9, 0.9]), "b": (1.0, [0.1, 0.1])})
    assert set(_verdicts(study).values()) == {None}
    assert "3 seeds" in study.advice()
