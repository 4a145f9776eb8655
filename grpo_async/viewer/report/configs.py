"""The configuration in the report: what may be shown of it, and where those of several runs differ. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_async.config.public import public_sections

MISSING = "(not set)"
_NUMBERS_ONLY = ("inference", "launch")  # addresses, accounts and options of a machine stay out
_PLAIN_WORDS = {"engine", "dtype", "device", "sharding"}
_NAMES_OF_THE_RUN = ("run.name", "run.dir")


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """A setting that is not the same in all runs. `values` are in the order of the runs, as text."""

    path: str
    values: Sequence[str]


def shown_config(sections: Mapping[str, Any]) -> dict[str, Any]:
    """What a report may show: `config.public`, and of `inference` and `launch` the numbers, switches and a few plain words.

    {"inference": {"replicas": 2, "host": "10.0.0.1", "vllm": {"kv_cache_mb": 512}}} ->
    {"inference": {"replicas": 2, "vllm": {"kv_cache_mb": 512}}}
    """
    shown = public_sections(sections)
    for name in _NUMBERS_ONLY:
        section = sections.get(name)
        if isinstance(section, Mapping) and (plain := _plain(section)):
            shown[name] = plain
    return shown


def _plain(section: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            if below := _plain(value):
                kept[key] = below
        elif isinstance(value, bool | int | float) or (key in _PLAIN_WORDS and isinstance(value, str)):
            kept[key] = value
    return kept


def flat(config: Mapping[str, Any]) -> dict[str, str]:
    """Dotted paths to values as text: {"a": {"b": 1}, "c": [{"d": 2}], "e": [1, 2]} -> "
    "{"a.b": "1", "c.0.d": "2", "e": "[1, 2]"}."""
    found: dict[str, str] = {}
    _flatten("", config, found)
    return found


def _flatten(path: str, value: Any, found: dict[str, str]) -> None:
    if isinstance(value, Mapping) and value:
        for key, below in value.items():
            _flatten(f"{path}.{key}" if path else str(key), below, found)
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        for number, below in enumerate(value):
            _flatten(f"{path}.{number}", below, found)
    else:
        found[path] = _text(value)


def _text(value: Any) -> str:
    """As YAML has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)


def differences(configs: Sequence[Mapping[str, Any]]) -> list[Difference]:
    """Settings that differ between at least two of the configurations, in the order of the first; the runs' names and folders,
    which always differ, are left out."""
    all_flat = [flat(config) for config in configs]
    paths = list(dict.fromkeys(path for one in all_flat for path in one))
    found = []
    for path in paths:
        values = [one.get(path, MISSING) for one in all_flat]
        if len(set(values)) > 1 and path not in _NAMES_OF_THE_RUN:
            found.append(Difference(path=path, values=values))
    return found
