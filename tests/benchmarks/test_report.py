"""What a benchmark says at its end, and how variants take turns."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from benchmarks.report import Report, Row, in_turns, median_interval, ratios


def test_a_row_has_median_quartiles_extremes_and_number() -> None:
    # quantiles of 1 2 3 4 5, exclusive: position 0.25 x 6 = 1.5 -> 1.5, and 4.5
    figures = Row("step", "s", (5.0, 1.0, 4.0, 2.0, 3.0)).figures()
    assert figures == {"median": 3.0, "quartile_1": 1.5, "quartile_3": 4.5, "lowest": 1.0, "highest": 5.0, "n": 5}


@pytest.mark.parametrize(
    ("value", "bound", "code"),
    [
        (1.0, {"at_most": 1.0}, 0),
        (1.01, {"at_most": 1.0}, 1),
        (0.9, {"at_least": 0.9}, 0),
        (0.89, {"at_least": 0.9}, 1),
        (float("nan"), {"at_most": 1.0}, 1),
    ],
)
def test_the_exit_code_says_whether_every_target_is_met(
    value: float, bound: dict[str, float], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report("x", {})
    report.target("fine", 1.0, at_most=2.0)
    report.target("ratio", value, **bound)
    assert report.finish() == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].startswith("met     fine: 1 (at most 2)")
    assert lines[-1].startswith("MISSED" if code else "met")


def test_the_json_has_machine_versions_settings_and_every_value(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    report = Report("x", argparse.Namespace(seed=7, folder=Path("/f"), json=file))
    report.row("step", [1, 2, 4], "s")
    report.target("step", 4.0, at_most=3.0)
    report.note("a note")
    assert report.finish() == 1
    written = json.loads(file.read_text(encoding="utf-8"))
    assert written["benchmark"] == "x"
    assert written["settings"] == {"seed": 7, "folder": "/f"}
    assert written["rows"][0]["values"] == [1.0, 2.0, 4.0]
    assert written["rows"][0]["median"] == 2.0
    assert written["targets"] == [{"what": "step", "value": 4.0, "at_most": 3.0, "at_least": None, "met": False}]
    assert written["notes"] == ["a note"]
    assert written["machine"]["cpus"] >= 1
    assert {"processor", "memory_gib", "gpus", "system"} <= set(written["machine"])
    assert {"python", "grpo-async", "torch"} <= set(written["versions"])
    assert written["load_average"].keys() == {"before", "after"}
    assert written["duration_s"] >= 0


def test_variants_take_turns_and_the_order_turns_around() -> None:
    assert list(in_turns(["a", "b", "c"], 2)) == [(0, "a"), (0, "b"), (0, "c"), (1, "c"), (1, "b"), (1, "a")]


def test_ratios_are_within_a_round() -> None:
    assert ratios({"a": [2.0, 9.0], "b": [1.0, 3.0]}, "a", "b") == [2.0, 3.0]
    with pytest.raises(ValueError, match="zip"):
        ratios({"a": [2.0, 9.0], "b": [1.0]}, "a", "b")


def test_the_interval_of_a_median_lies_within_the_values_and_is_the_same_for_a_seed() -> None:
    values = [float(value) for value in range(1, 22)]
    low, high = median_interval(values, seed=3)
    assert 1 < low < 11 < high < 21
    assert median_interval(values, seed=3) == (low, high)
    assert median_interval([5.0]) == (5.0, 5.0)
