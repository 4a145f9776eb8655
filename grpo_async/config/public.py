"""What of a configuration may leave this machine: into a model card that people upload, and to trackers on the web.

A value that was written as `${NAME}` stands resolved in a configuration, and it may be a secret. Such values are for the user's
code (`arguments`, keys that end in `_kwargs`, an agent's command), or they say where a run is and whom it talks to.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_async.config.experiment import ExperimentConfig

_LEFT_OUT = {"launch", "inference", "tracking"}
_AGENT_SECRETS = {"command", "environment", "host", "port", "tls", "read_paths"}
_HIDDEN = "..."


def public_config(config: ExperimentConfig) -> dict[str, Any]:
    """The configuration in plain JSON types, without `launch`, `inference` and `tracking`, and with "..." for each value of
    `arguments` and of what says how an agent is started and where.

    {"rewards": [{"function": "mine:judge", "arguments": {"api_key": "sk-1"}}]} ->
    {"rewards": [{"function": "mine:judge", "arguments": {"api_key": "..."}}]}
    """
    return public_sections(config.model_dump(mode="json"))


def public_sections(sections: Mapping[str, Any]) -> dict[str, Any]:
    """The same of a configuration in plain types, such as a config.yaml that another version wrote."""
    return {name: _public(section) for name, section in sections.items() if name not in _LEFT_OUT}


def _public(value: Any) -> Any:
    if isinstance(value, dict):
        found = {
            key: _hidden(below) if key.endswith(("arguments", "_kwargs")) else _public(below)
            for key, below in value.items()
        }
        if isinstance(agent := found.get("agent"), dict):
            hidden = {key: _HIDDEN for key in _AGENT_SECRETS if agent.get(key)}
            found["agent"] = agent | hidden
        return found
    if isinstance(value, list):
        return [_public(below) for below in value]
    return value


def _hidden(arguments: Any) -> Any:
    """Keep the argument names, hide their values."""
    return dict.fromkeys(arguments, _HIDDEN) if isinstance(arguments, dict) else _HIDDEN
