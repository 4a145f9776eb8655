"""evaluations.jsonl: one line per evaluation of a run, and per one that was left out or failed. What is in it is done.

{"step": 20, "due": 20, "when": "step", "metrics": {"reward": 0.5, ...}, "by_group": {"gsm8k": {...}}, "prompt_rewards": [1.0, ...]}
{"step": 24, "due": 24, "when": "step", "skipped": "the evaluation of step 20 was still running"}
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_async.evaluation.metrics import EvaluationResult
from grpo_async.run_directory import write_atomically
from grpo_async.tracking.jsonl import keep_steps
from grpo_async.utils.json_files import read_objects

When = Literal["start", "step", "end"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRecord:
    """`step` is the one at whose end it began, `due` the one for which it was due: earlier where a run that was killed made it up
    for after its resume. Either `result`, or why there is none (`skipped`, `error`)."""

    step: int
    due: int
    when: When
    result: EvaluationResult | None = None
    skipped: str | None = None
    error: str | None = None


class EvaluationLog:
    """Reads and appends. Records of steps after `start`, which will run again, are dropped first."""

    def __init__(self, path: Path, *, start: int) -> None:
        self._path = path
        keep_steps(path, start)
        self.records = [_from_dict(line) for line in read_objects(path, [])]

    def add(self, record: EvaluationRecord) -> None:
        self.records.append(record)
        self._write()

    def _write(self) -> None:
        write_atomically(self._path, "".join(json.dumps(_as_dict(record)) + "\n" for record in self.records))

    def result(self, when: When) -> EvaluationResult | None:
        """That of the last evaluation before (`start`) or after training (`end`)."""
        return next((r.result for r in reversed(self.records) if r.when == when and r.result is not None), None)

    def has_failed(self, step: int) -> bool:
        """Whether the last evaluation of this step is recorded as failed."""
        last = next((record for record in reversed(self.records) if record.step == step), None)
        return last is not None and last.error is not None

    def pending(self, start: int, *, at_start: bool, every_steps: int | None) -> int | None:
        """The step for which a run that goes on from step `start` still owes an evaluation; None: it owes none.

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


def _as_dict(record: EvaluationRecord) -> dict[str, Any]:
    head = {"step": record.step, "due": record.due, "when": record.when}
    why = {"skipped": record.skipped, "error": record.error}
    result = {} if record.result is None else record.result.as_dict()
    return head | {name: text for name, text in why.items() if text is not None} | result


def _from_dict(content: Mapping[str, Any]) -> EvaluationRecord:
    result = None
    if "metrics" in content:
        rewards = content.get("prompt_rewards", [])  # an earlier version did not write them
        result = EvaluationResult(metrics=content["metrics"], by_group=content["by_group"], prompt_rewards=rewards)
    return EvaluationRecord(
        step=content["step"],
        due=content["due"],
        when=content["when"],
        result=result,
        skipped=content.get("skipped"),
        error=content.get("error"),
    )
