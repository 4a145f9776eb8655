"""A reward for runs that only have to go on: every group has a signal."""

from __future__ import annotations

from typing import Any


def by_place(completions: list[Any], **_: Any) -> list[float]:
    return [float(place) for place in range(len(completions))]
