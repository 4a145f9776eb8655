"""A reward function for a test of failures."""

from __future__ import annotations

from typing import Any


def always_raises(completions: list[Any], **_: Any) -> list[float]:
    raise RuntimeError("this reward never works")


def always_zero(completions: list[Any], **_: Any) -> list[float]:
    return [0.0] * len(completions)
