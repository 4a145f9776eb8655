"""From observations to findings; numbers by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from grpo_async.findings import Finding, Severity
from grpo_async.rewards.audit import Observation, Observations
from grpo_async.rewards.audit_report import make_report
from grpo_async.rewards.fuzz import Case, CaseKind

GOLD, LOOKALIKE, EMPTY, GARBAGE, WRONG = (
    CaseKind.GOLD,
    CaseKind.LOOKALIKE,
    CaseKind.EMPTY,
    CaseKind.GARBAGE,
    CaseKind.WRONG,
)


def _seen(kind: CaseKind, value: float | None, *, row: int = 0, name: str = "", **more: Any) -> Observation:
    case = Case(kind=kind, name=name or kind.value, completion="", completion_ids=[], rendering="plain")
    return Observation(row=row, case=case, value=value, **more)


def _find(*singles: Observation, asks_for_gold: bool = False, place: str = "thread") -> Sequence[Finding]:
    seen = Observations(singles=list(singles))
    return make_report(seen, name="f", place=place, timeout_s=10.0, slow_s=1.0, asks_for_gold=asks_for_gold).findings


def _rows(num: int, *values: tuple[CaseKind, float | None]) -> list[Observation]:
    return [_seen(kind, value, row=row) for row in range(num) for kind, value in values]


@pytest.mark.parametrize(("score", "severity"), [(0.05, None), (0.3, "warning"), (0.89, "warning"), (0.95, "error")])
def test_what_garbage_earns_is_judged_by_its_share_of_gold(score: float, severity: str | None) -> None:
    found = _find(*_rows(4, (GOLD, 1.0), (LOOKALIKE, 0.0), (EMPTY, 0.0), (GARBAGE, score)))
    assert [finding.severity.value for finding in found] == ([] if severity is None else [severity])
    if severity is not None:
        assert found[0].title.startswith(f"It pays garbage: on row 0 `garbage` got {score:g}")


@pytest.mark.parametrize(("num_lucky", "severity"), [(2, "warning"), (3, "error")])
def test_garbage_that_is_right_on_a_quarter_of_the_rows_may_be_chance(num_lucky: int, severity: str) -> None:
    rows = _rows(8, (GOLD, 1.0), (LOOKALIKE, 0.0), (EMPTY, 0.0))
    lucky = [_seen(GARBAGE, 1.0 if row < num_lucky else 0.0, row=row) for row in range(8)]
    (finding,) = _find(*rows, *lucky)
    assert (finding.severity.value, list(finding.rows)) == (severity, list(range(num_lucky)))


def test_gold_below_garbage_is_an_error_that_names_both() -> None:
    found = _find(*_rows(2, (GOLD, 0.5), (LOOKALIKE, 0.0), (EMPTY, 0.0), (GARBAGE, 1.0)))
    assert found[0].severity is Severity.ERROR
    assert found[0].title == "Gold is below the maximum: on row 0 gold got 0.5, `garbage` got 1."
    assert list(found[0].rows) == [0, 1]


def test_a_row_whose_gold_gets_nothing_is_an_error_and_one_that_gets_less_a_warning() -> None:
    lost = _find(*_rows(3, (GOLD, 1.0), (LOOKALIKE, 0.0)), _seen(GOLD, 0.0, row=3), _seen(LOOKALIKE, 0.0, row=3))
    assert [(f.severity.value, list(f.rows)) for f in lost] == [("error", [3])]
    assert "no more than garbage (0), where other rows' gets up to 1" in lost[0].title
    less = _find(*_rows(3, (GOLD, 1.0), (LOOKALIKE, 0.0)), _seen(GOLD, 0.6, row=3), _seen(LOOKALIKE, 0.0, row=3))
    assert [(f.severity.value, list(f.rows)) for f in less] == [("warning", [3])]


def test_the_best_rendering_of_gold_counts() -> None:
    boxed = Case(kind=GOLD, name="boxed", completion="", completion_ids=[], rendering="boxed")
    singles = [_seen(GOLD, 0.0), Observation(row=0, case=boxed, value=1.0), _seen(EMPTY, 0.0), _seen(LOOKALIKE, 0.0)]
    lookalike = Case(kind=LOOKALIKE, name="boxed lookalike", completion="", completion_ids=[], rendering="boxed")
    assert _find(*singles, Observation(row=0, case=lookalike, value=0.0)) == []


def test_the_same_score_for_everything_teaches_nothing() -> None:
    rows = _rows(2, (GOLD, 1.0), (LOOKALIKE, 1.0), (EMPTY, 1.0))
    (finding,) = _find(*rows)
    assert (finding.severity.value, finding.title) == ("warning", "It gives every input the same score (1).")
    (finding,) = _find(*rows, asks_for_gold=True)
    assert finding.severity is Severity.ERROR


def test_none_for_everything_and_none_for_gold_are_warnings() -> None:
    (finding,) = _find(*_rows(2, (GOLD, None), (EMPTY, None)))
    assert finding.title == "It returned None (not applicable) for all 4 inputs."
    (finding,) = _find(*_rows(2, (GOLD, 1.0), (LOOKALIKE, 0.0)), _seen(GOLD, None, row=2), _seen(EMPTY, 0.0, row=2))
    assert (finding.severity.value, list(finding.rows)) == ("warning", [2])
    assert "returned None for the right answer" in finding.title


def test_slowness_is_told_with_the_way_out() -> None:
    good = _rows(1, (GOLD, 1.0), (LOOKALIKE, 0.0))
    (in_thread,) = _find(*good, _seen(EMPTY, 0.0, duration_s=6.0))
    assert "`empty` took 6.0 s, more than half of timeout_s = 10" in in_thread.title
    assert "set `run_in: process`" in in_thread.fix
    (in_process,) = _find(*good, _seen(EMPTY, 0.0, duration_s=2.0), place="process")
    assert "`empty` took 2.0 s." in in_process.title
    assert "run_in: process" not in in_process.fix
