"""Writes the rows of a task as JSON lines, in an order that the seed decides."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], *, seed: int) -> None:
    """Write the rows, shuffled by the seed, such as `{"prompt": [{"role": "user", ...}], "answer": "5"}`."""
    rng = random.Random(seed)
    # sorted by rng.random(): the one generator whose sequence Python promises to keep; shuffle() may change
    shuffled = sorted(((rng.random(), row) for row in rows), key=lambda pair: pair[0])
    with path.open("w", encoding="utf-8") as file:
        for _, row in shuffled:
            file.write(json.dumps(row) + "\n")
