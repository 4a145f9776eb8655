"""The smallest configurations. Nothing that they name exists."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_async.config import ExperimentConfig

MINIMAL = """\
run: {name: demo}
model: {path: m}
data: {train: {type: jsonl, path: t}}
rewards: [{function: "a:b"}]
"""  # 4 lines: what a test adds begins at line 5
SMALLEST: dict[str, Any] = {
    "run": {"name": "test"},
    "model": {"path": "m"},
    "data": {"train": {"type": "jsonl", "path": "t"}},
    "rewards": [{"function": "a:b"}],
}


def small_config(**sections: Any) -> ExperimentConfig:
    """The smallest configuration with these sections."""
    return ExperimentConfig.model_validate(merged(SMALLEST, sections))


def merged(base: Mapping[str, Any], sections: Mapping[str, Any]) -> dict[str, Any]:
    """`sections` over `base`, key by key of each section; a list replaces a list."""
    result = dict(base)
    for name, values in sections.items():
        result[name] = {**result.get(name, {}), **values} if isinstance(values, Mapping) else values
    return result
