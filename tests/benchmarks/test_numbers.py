"""The arithmetic of the benchmarks, by hand."""

from __future__ import annotations

from argparse import Namespace

import pytest

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
