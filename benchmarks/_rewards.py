"""Rewards of benchmarks, named by their configurations. Both differ within a group, so that every group is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEAVY_MS = 5.0
"""About what `heavy` takes for one completion, in pure Python, on a core of 3 GHz."""
_LOOPS_PER_MS = 25_000


def light(completions: Sequence[Any], completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Looks at the text once, as a reward that compares an answer does."""
    texts = (completion if isinstance(completion, str) else completion[-1]["content"] for completion in completions)
    return [float("return" in text) + ids[0] / 65536 for text, ids in zip(texts, completion_ids, strict=True)]


def heavy(completion_ids: Sequence[Sequence[int]], **_: Any) -> list[float]:
    """Computes in pure Python, and never lets go of the interpreter by itself."""
    values = []
    for ids in completion_ids:
        state = ids[0]
        for _step in range(round(_LOOPS_PER_MS * HEAVY_MS)):
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        values.append(state / 0x7FFFFFFF)
    return values
