"""The evaluations of a run so far, in evaluations.jsonl, and the one that is owed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grpo_async.run_directory import write_atomically
from grpo_async.tracking.evaluation_record import EvaluationRecord, When, read_evaluations
from grpo_async.tracking.jsonl import keep_steps


class EvaluationLog:
    """Reads and appends. Records of steps after `start`, which will run again, are dropped first."""

    def __init__(self, path: Path, *, start: int) -> None:
        self._path = path
        keep_steps(path, start)
        self.records = list(read_evaluations(path, []))

    def add(self, record: EvaluationRecord) -> None:
        self.records.append(record)
        self._write()

    def end_with(self, step: int) -> EvaluationRecord | None:
        """The result of `step`, with which the run turned out to end, as that of the end, which it is already where the run was
        killed after it; None when the last record has no such result."""
        last = self.records[-1] if self.records else None
        if last is None or last.step != step or last.when == "start" or not last.metrics:
            return None
        self.records[-1] = replace(last, when="end")
        self._write()
        return self.records[-1]

    def _write(self) -> None:
        write_atomically(self._path, "".join(json.dumps(each.as_dict()) + "\n" for each in self.records))

    def result(self, when: When) -> EvaluationRecord | None:
        """The last with a result before (`start`) or after training (`end`)."""
        return next((record for record in reversed(self.records) if record.when == when and record.metrics), None)

    def has_failed(self, step: int) -> bool:
        """Whether the last evaluation of this step is recorded as failed."""
        last = next((record for record in reversed(self.records) if record.step == step), None)
        return last is not None and last.error is not None

    def pending(self, start: int, *, at_start: bool, every_steps: int | None) -> int | None:
        """The step for which a run that resumes at step `start` still owes an evaluation; None: it owes none.

        That is the last one that was due and is not in the log: the process ended while it ran. Every 4 steps and a resume from
        step 9: 8 is in the log -> None; it is not -> 8; it was left out because that of 4 still ran, and 4 is not in -> 4.
        """
        done = {record.due: record for record in self.records}
        for due in _due_steps(start, at_start=at_start, every_steps=every_steps):
            record = done.get(due)
            if record is None:
                return due
            if record.skipped is None:
                return None
        return None


def _due_steps(start: int, *, at_start: bool, every_steps: int | None) -> Sequence[int]:
    """Due up to `start`, the last first: start 9, every 4 -> 8, 4, and 0 with at_start."""
    during = range(start - start % every_steps, 0, -every_steps) if every_steps else range(0)
    return [*during, *([0] if at_start else [])]
