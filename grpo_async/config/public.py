"""The part of a configuration that may leave this machine: into model cards that people upload, to trackers, into reports.

A value that was written as `${NAME}` stands resolved in a configuration, and it may be a secret. Such values are for the user's
code (`arguments`, keys that end in `_kwargs`, an agent's command), or they say where a run is and whom it talks to.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from grpo_async.config.experiment import ExperimentConfig

_LEFT_OUT = {"launch", "inference", "tracking"}
_SECRETS = {"agent": {"command", "environment", "host", "port"}, "weights": {"host"}}
_HIDDEN = "..."
_NUMBERS_ONLY = ("inference", "launch")  # addresses, accounts and options of a machine stay out
_PLAIN_WORDS = {"engine", "dtype", "device", "sharding"}


def public_config(config: ExperimentConfig) -> dict[str, Any]:
    """The configuration in plain JSON types, without `launch`, `inference` and `tracking`, and with "..." for each value of
    `arguments` and of keys that end in `_kwargs`, for what says how an agent is started and where, and for `weights.host`.

    {"rewards": [{"function": "mine:judge", "arguments": {"api_key": "sk-1"}}]} ->
    {"rewards": [{"function": "mine:judge", "arguments": {"api_key": "..."}}]}
    """
    return _public_sections(config.model_dump(mode="json"))


def shown_config(sections: Mapping[str, Any]) -> dict[str, Any]:
    """What a report may show of a config.yaml, also of another version: what `public_config` keeps, and of `inference` and `launch`
    the numbers, switches and a few plain words.

    {"inference": {"replicas": 2, "host": "10.0.0.1", "vllm": {"kv_cache_mb": 512}}} ->
    {"inference": {"replicas": 2, "vllm": {"kv_cache_mb": 512}}}
    """
    shown = _public_sections(sections)
    for name in _NUMBERS_ONLY:
        section = sections.get(name)
        if isinstance(section, Mapping) and (plain := _plain(section)):
            shown[name] = plain
    return shown


def is_public(path: str) -> bool:
    """Whether the value at a dotted path may be shown: that of `rewards.0.arguments.api_key` may not."""
    parts = path.split(".")
    is_hidden = any(part.endswith(("arguments", "_kwargs")) for part in parts) or parts[0] == "tracking"
    return not is_hidden and not any(key in _SECRETS.get(section, ()) for section, key in pairwise(parts))


def _plain(section: Mapping[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in section.items():
        if isinstance(value, Mapping):
            if below := _plain(value):
                kept[key] = below
        elif isinstance(value, bool | int | float) or (key in _PLAIN_WORDS and isinstance(value, str)):
            kept[key] = value
    return kept


def _public_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    shown: dict[str, Any] = _public({name: section for name, section in sections.items() if name not in _LEFT_OUT})
    return shown


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        found = {
            key: _hidden(below) if key.endswith(("arguments", "_kwargs")) else _public(below)
            for key, below in value.items()
        }
        for name, keys in _SECRETS.items():
            if isinstance(section := found.get(name), dict):
                found[name] = section | {key: _HIDDEN for key in keys if section.get(key)}
        return found
    if isinstance(value, list):
        return [_public(below) for below in value]
    return value


def _hidden(arguments: Any) -> Any:
    """Keep the argument names, hide their values."""
    return dict.fromkeys(arguments, _HIDDEN) if isinstance(arguments, dict) else _HIDDEN
