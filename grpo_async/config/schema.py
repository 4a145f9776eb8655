"""The JSON schema of a configuration file, for editors: completion, help texts, squiggles under errors.

It differs from pydantic's own where a file may say more than a resolved configuration: `extends` is allowed, a file that
extends another may leave out what the other says, and `${NAME}` may stand for a number.
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
_INTERPOLATION = {"type": "string", "pattern": r"\$\{.+\}"}
_VALUE_TYPES = ("number", "integer", "boolean")


def config_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of what `load_config` reads."""
    schema = ExperimentConfig.model_json_schema()
    required = schema.pop("required")
    for definition in schema["$defs"].values():
        _relax(definition)
    schema["properties"] = {"extends": _EXTENDS, **{key: _open(below) for key, below in schema["properties"].items()}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        **schema,
        "title": "grpo-async experiment",
        "anyOf": [{"required": ["extends"]}, {"required": required}],
    }


def schema_text() -> str:
    """The schema as it stands in configs/schema.json."""
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"


def _relax(definition: dict[str, Any]) -> None:
    """Required keys may come from a base file; a `type` stays required, since it tells the members of a union apart."""
    properties = definition.get("properties", {})
    required = [key for key in definition.pop("required", []) if "const" in properties[key]]
    if required:
        definition["required"] = required
    for key, below in properties.items():
        properties[key] = _open(below)


def _open(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of one value, where an interpolation may stand for a number, a boolean or a choice."""
    if "oneOf" in schema:  # `{path: x}` fits the default member and, without its required keys, perhaps others
        schema = {
            ("anyOf" if key == "oneOf" else key): below for key, below in schema.items() if key != "discriminator"
        }
    if "anyOf" in schema and any(_is_value(part) for part in schema["anyOf"]):
        return {**schema, "anyOf": [*schema["anyOf"], _INTERPOLATION]}
    if not _is_value(schema):
        return schema
    outside = ("title", "description", "default")
    kept = {key: below for key, below in schema.items() if key in outside}
    return {**kept, "anyOf": [{key: below for key, below in schema.items() if key not in outside}, _INTERPOLATION]}


def _is_value(schema: dict[str, Any]) -> bool:
    return schema.get("type") in _VALUE_TYPES or "enum" in schema
