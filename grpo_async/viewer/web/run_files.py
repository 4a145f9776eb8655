"""What the page shows of a run beside its rollouts: metrics, status, advice, evaluations."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from grpo_async.rundir import RunDir
from grpo_async.utils.growing_file import GrowingFile

_TAIL_BYTES = 256 * 1024


class MetricLog:
    """metrics.jsonl, read on from where the last look ended. Safe in several threads.

    A step that occurs twice (the run went on from an earlier checkpoint) counts as it was written last.
    """

    def __init__(self, path: Path) -> None:
        self._lock = threading.Lock()
        self._rows: dict[int, dict[str, float]] = {}  # ascending by step
        self._file = GrowingFile(path, self._rows.clear)

    def names(self) -> list[str]:
        """All metrics that occurred, in alphabetic order."""
        return sorted({name for row in self._read().values() for name in row if name != "step"})

    def num_steps(self) -> int:
        return len(self._read())

    def series(self, names: Sequence[str]) -> dict[str, Any]:
        """{"steps": [...], "series": {name: [...]}}: one entry per step, ascending; None where a step lacks the metric."""
        rows = self._read()
        steps = sorted(rows)
        return {"steps": steps, "series": {name: [_finite(rows[step].get(name)) for step in steps] for name in names}}

    def _read(self) -> dict[int, dict[str, float]]:
        with self._lock:
            for _, line in self._file.new_lines():
                row = _object(line)
                if row is not None and isinstance(row.get("step"), int):
                    while self._rows and next(reversed(self._rows)) > row["step"]:
                        self._rows.popitem()  # a step of a branch that was left
                    self._rows[row["step"]] = row
            return dict(self._rows)


def read_json(path: Path) -> dict[str, Any] | None:
    """The object in a file; None where there is none, or none that can be read (another version may have written it)."""
    try:
        return _object(path.read_bytes())
    except FileNotFoundError:
        return None


def read_lines(path: Path, *, most: int) -> list[dict[str, Any]]:
    """The last objects of a file with one a line."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")
    except FileNotFoundError:
        return []
    rows = [_object(line) for line in (lines if size <= _TAIL_BYTES else lines[1:])]
    return [row for row in rows if row is not None][-most:]


def describe(run: RunDir) -> dict[str, Any]:
    """Where a run stands, as its own files say it."""
    return {
        "folder": str(run.root),
        "status": read_json(run.status),
        "summary": read_json(run.summary),
        "advice": read_lines(run.advice, most=1),
        "evaluations": read_lines(run.evaluation_log, most=200),
    }


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    return found if isinstance(found, dict) else None


def _finite(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
