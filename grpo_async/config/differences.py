"""In which values two configurations differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, str]:
    """By dotted path: {"optimizer.lr": "optimizer.lr: 1e-05 -> 0.0001"}."""
    before, after = dict(_leaves(old)), dict(_leaves(new))
    changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
    return {key: f"{key}: {_short(before.get(key))} -> {_short(after.get(key))}" for key in changed}


def _leaves(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """{"a": {"b": 1}} -> ("a.b", 1). Lists and empty mappings are leaves."""
    if isinstance(value, dict) and value:
        for key, below in value.items():
            yield from _leaves(below, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."
