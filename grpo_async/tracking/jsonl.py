"""metrics.jsonl: one JSON object per optimizer step, flushed per line, so a reader sees whole lines while the run writes."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path


class MetricsLog:
    """Appends to a file; after a resume, lines of steps that will run again are dropped first."""

    def __init__(self, path: Path, *, first_step: int = 1) -> None:
        if path.exists():
            kept = [line for line in read_metrics(path) if line["step"] < first_step]
            temporary = path.with_name(path.name + ".tmp")
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            temporary.replace(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line. A value that is not finite is written as null: JSON has no NaN."""
        values = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._file.write(json.dumps({"step": step, **values}) + "\n")

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, float]]:
    """The lines of a metrics file; a torn last line (crash while writing) is left out."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield json.loads(line)
