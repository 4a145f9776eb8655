"""In which settings configurations differ."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.config.public import is_public
from grpo_async.utils.text import clipped

MISSING = "(not set)"


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting that is not the same in all configurations. `values` are in their order, as text."""

    path: str
    values: Sequence[str]

    def __str__(self) -> str:
        """ "optimizer.lr: 1e-05 -> 0.0001", shortened; without values that may be secret."""
        if not is_public(self.path):
            return f"{self.path}: another value (not shown, since it may be secret)"
        return f"{self.path}: {' -> '.join(clipped(text, 80) for text in self.values)}"


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Dotted paths to values as text: {"a": {"b": 1}, "c": [{"d": None}], "e": [1, 2]} ->
    {"a.b": "1", "c.0.d": "null", "e": "[1, 2]"}."""
    return {path: _text(value) for path, value in _leaves("", config)}


def texts_in(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every text in a configuration with its dotted path, also those of a list of texts."""
    for path, value in _leaves("", config):
        yield from ((path, each) for each in (value if isinstance(value, list) else [value]) if isinstance(each, str))


def differences(configs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Settings that differ between at least two of the configurations, in the order of the first."""
    all_flat = [flat(config) for config in configs]
    paths = dict.fromkeys(path for one in all_flat for path in one)
    found = [Difference(path=path, values=[one.get(path, MISSING) for one in all_flat]) for path in paths]
    return [difference for difference in found if len(set(difference.values)) > 1]


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            yield from _leaves(f"{path}.{key}" if path else str(key), below)
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        for number, below in enumerate(value):
            yield from _leaves(f"{path}.{number}", below)
    else:
        yield path, value


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | None) else str(value)
