"""The reward of both sides: cheap, and different for every completion, so that no group is without a signal."""

from __future__ import annotations

from typing import Any


def share_of_low_ids(completion_ids: list[list[int]], **columns: Any) -> list[float]:
    """Share of a completion's tokens whose id is below 192. [[1, 500], [2, 3]] -> [0.5, 1.0]"""
    return [sum(token < 192 for token in ids) / max(1, len(ids)) for ids in completion_ids]
