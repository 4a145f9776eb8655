"""The part of a configuration that may leave this machine: into model cards that people upload, to trackers, into reports.

A value that was written as `${NAME}` stands resolved in a configuration, and it may be a secret. Such values are for the user's
code (`arguments`, keys that end in `_kwargs`, an agent's command), or they say where a run is and whom it talks to.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from grpo_async.config.experiment import ExperimentConfig

_HIDDEN = "..."
_SECRETS = {"agent": {"command", "environment", "host", "port"}, "weights": {"host"}}
_PLAIN_WORDS = {"engine", "dtype", "embedded.device", "device", "sharding"}


def is_public(path: str) -> bool:
    """Whether the value at a dotted path may be shown: that of `rewards.0.arguments.api_key` may not."""
    parts = path.split(".")
    is_hidden = any(part.endswith(("arguments", "_kwargs")) for part in parts) or parts[0] == "tracking"
    return not is_hidden and not any(key in _SECRETS.get(section, ()) for section, key in pairwise(parts))


def public_config(config: ExperimentConfig) -> dict[str, Any]:
    """What `shown_config` keeps, without `launch` and `inference`, in plain JSON types."""
    return shown_config(config.model_dump(mode="json", exclude={"launch", "inference"}))


def shown_config(sections: Mapping[str, Any]) -> dict[str, Any]:
    """A config.yaml, also of another version, without `tracking`, with "..." for each value that is not public; of `inference` and
    `launch` the numbers, switches and a few plain words are.

    {"rewards": [{"function": "mine:judge", "arguments": {"api_key": "sk-1"}}], "inference": {"replicas": 2, "host": "10.0.0.1"}} ->
    {"rewards": [{"function": "mine:judge", "arguments": {"api_key": "..."}}], "inference": {"replicas": 2, "host": "..."}}
    """
    return {name: _shown(section, name) for name, section in sections.items() if name != "tracking"}


def _shown(value: Any, path: str) -> Any:
    section, _, key = path.partition(".")
    is_hidden = section in ("inference", "launch") and isinstance(value, str) and key not in _PLAIN_WORDS
    if is_hidden or not is_public(path):
        return dict.fromkeys(value, _HIDDEN) if isinstance(value, dict) else value and _HIDDEN
    if isinstance(value, dict):
        return {key: _shown(below, f"{path}.{key}") for key, below in value.items()}
    return [_shown(below, path) for below in value] if isinstance(value, list) else value
