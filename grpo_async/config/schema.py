"""The JSON schema of a configuration file, for editors: completion, help texts, squiggles under errors.

It differs from pydantic's own in that `extends` is allowed, and that a file that extends another may leave out what the other says.
"""

from __future__ import annotations

import json
from typing import Any

from grpo_async.config.experiment import ExperimentConfig

_EXTENDS = {
    "title": "Extends",
    "description": "Files (relative to this one) that this file is merged over: one name or a list; later ones win.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def config_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of what `load_config` reads."""
    schema: dict[str, Any] = _relaxed(ExperimentConfig.model_json_schema())
    required = schema.pop("required")
    for definition in schema["$defs"].values():
        # a `type` stays required, since it tells the members of a union apart; the rest may come from a base file
        types = [key for key in definition.pop("required", []) if "const" in definition["properties"][key]]
        definition |= {"required": types} if types else {}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "properties": {"extends": _EXTENDS, **schema["properties"]},
        "title": "grpo-async experiment",
        "anyOf": [{"required": ["extends"]}, {"required": required}],
    }


def _relaxed(node: Any) -> Any:
    """`oneOf` as `anyOf`: {path: x} fits the default member of a union and, without its required keys, perhaps others."""
    if isinstance(node, list):
        return [_relaxed(each) for each in node]
    if not isinstance(node, dict):
        return node
    below = {key: _relaxed(value) for key, value in node.items() if key != "discriminator"}
    return {("anyOf" if key == "oneOf" else key): value for key, value in below.items()}


def schema_text() -> str:
    """The schema as it stands in configs/schema.json."""
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"
