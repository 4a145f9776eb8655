"""evaluations.jsonl: what is in it is done, what is not is owed."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_async.evaluation.log import EvaluationLog
from grpo_async.tracking.evaluation_record import EvaluationRecord, When


def _record(step: int, when: When = "step", *, due: int | None = None, skipped: bool = False) -> EvaluationRecord:
    return EvaluationRecord(
        step=step,
        due=step if due is None else due,
        when=when,
        metrics={} if skipped else {"reward": float(step)},
        by_group={} if skipped else {"a": {"reward": 1.0}},
        skipped="another ran" if skipped else None,
    )


def test_what_was_added_is_read_back_and_later_steps_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "evaluations.jsonl"
    log = EvaluationLog(path, start=0)
    records = [_record(0, "start"), _record(4), _record(8, skipped=True), _record(12, "end")]
    for record in records:
        log.add(record)
    assert EvaluationLog(path, start=12).records == records
    assert EvaluationLog(path, start=8).records == records[:3]
    assert EvaluationLog(path, start=12).records == records[:3]  # the line is gone from the file, too
    assert log.result("end") == records[-1]
    path.write_bytes(path.read_bytes() + b'{"step": 8, "wh\xff\n')
    assert EvaluationLog(path, start=12).records == records[:3]
    assert path.with_name("evaluations.jsonl.damaged").exists()
    assert EvaluationLog(tmp_path / "none", start=3).records == []


@pytest.mark.parametrize(
    ("records", "start", "owed"),
    [
        ([], 0, 0),
        ([_record(0, "start")], 0, None),
        ([_record(0, "start")], 3, None),
        ([], 3, 0),
        ([_record(0, "start")], 4, 4),
        ([_record(0, "start")], 9, 8),
        ([_record(0, "start"), _record(8)], 9, None),
        ([_record(0, "start"), _record(9, due=8)], 9, None),
        # 8 was left out because that of 4 still ran when the process ended
        ([_record(0, "start"), _record(8, skipped=True)], 9, 4),
        ([_record(0, "start"), _record(4), _record(8, skipped=True)], 9, None),
    ],
)
def test_the_last_evaluation_that_was_due_and_is_not_done_is_owed(
    tmp_path: Path, records: list[EvaluationRecord], start: int, owed: int | None
) -> None:
    log = EvaluationLog(tmp_path / "log", start=0)
    for record in records:
        log.add(record)
    assert log.pending(start, at_start=True, every_steps=4) == owed


def test_without_evaluations_at_the_start_or_during_training_none_is_owed(tmp_path: Path) -> None:
    log = EvaluationLog(tmp_path / "log", start=0)
    assert log.pending(9, at_start=False, every_steps=None) is None
    assert log.pending(9, at_start=False, every_steps=4) == 8
    assert log.pending(3, at_start=False, every_steps=4) is None
    assert log.pending(9, at_start=True, every_steps=None) == 0
