"""Every key of a configuration with its type, range, default and meaning, read from the JSON schema."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.other_trainers import OTHER_NAMES

_BOUNDS = (
    ("minimum", "at least"),
    ("exclusiveMinimum", "more than"),
    ("maximum", "at most"),
    ("exclusiveMaximum", "less than"),
)
_TYPES = {
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "string": "text",
    "object": "mapping",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key.

    Attributes:
        path: `rollout.group_size`; an entry of a list is `rewards[].function`, of a mapping `environments.NAME.factory`.
        of_types: values of the section's `type` that have this key; empty where all do.
        default: as YAML has it; None where the key must be given, or is a section.
    """

    path: str
    type: str
    default: str | None
    is_section: bool
    meaning: str
    of_types: tuple[str, ...] = ()

    @property
    def elsewhere(self) -> str:
        """What other trainers call it: "num_generations (TRL), rollout.n (verl)"; empty where nobody has it."""
        return ", ".join(f"{other.name} ({other.trainer})" for other in OTHER_NAMES if other.here == self.path)

    @property
    def summary(self) -> str:
        """Its type and default, on one line."""
        end = "" if self.is_section else "; required" if self.default is None else f"; default {self.default}"
        only = f" (with type {' or '.join(self.of_types)})" if self.of_types else ""
        return f"{self.type}{end}{only}"


def all_keys() -> list[Key]:
    """In the order of the sections."""
    schema = ExperimentConfig.model_json_schema()
    return list(_keys(schema, "", schema["$defs"]))


def find_keys(keys: Sequence[Key], word: str) -> list[Key]:
    """The key with this path; else those whose path ends in it or that another trainer calls so; else those that contain all the
    words, in path, meaning or other names."""
    bare = re.sub(r"\.[0-9]+(?=\.|$)|\[\]", "", word)
    named = {other.here for other in OTHER_NAMES if other.name == word.lstrip("-")}
    if exact := [key for key in keys if re.fullmatch(_plain(key).replace("NAME", "[^.]+"), bare)]:
        return exact
    if ends := [key for key in keys if _plain(key).endswith(f".{bare}") or key.path in named]:
        return ends
    words = word.lower().split()
    return [key for key in keys if all(part in f"{key.path} {key.meaning} {key.elsewhere}".lower() for part in words)]


def beside(keys: Sequence[Key], key: Key) -> list[Key]:
    """The other keys of its section, or those within it."""
    above = f"{key.path}." if key.is_section else _parent(key.path)
    return [other for other in keys if _parent(other.path) == above and other != key]


def _plain(key: Key) -> str:
    return key.path.replace("[]", "")


def _parent(path: str) -> str:
    return path.rpartition(".")[0] + "."


def _keys(schema: Mapping[str, Any], prefix: str, definitions: Mapping[str, Any]) -> Iterator[Key]:
    for name, node in schema.get("properties", {}).items():
        path, required = prefix + name, name in schema.get("required", ())
        sections = _sections(node, definitions)
        yield Key(
            path=path,
            type=_type(node, definitions),
            default=None if required or sections else _default(node),
            is_section=bool(sections),
            meaning=node.get("description", ""),
        )
        yield from _merged(
            [list(_keys(part, f"{path}{suffix}.", definitions)) for suffix, part in sections],
            [part for _, part in sections],
        )


def _sections(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The sections that a value may be, hold as the entries of a list, or as the values of a mapping: ("[]", {properties})."""
    found = []
    for part in _parts(node, definitions):
        inner = part.get("items") if part.get("type") == "array" else part.get("additionalProperties")
        if "properties" in part:
            found.append(("", part))
        elif isinstance(inner, dict):
            mark = "[]" if part.get("type") == "array" else ".NAME"
            found += [(mark + suffix, below) for suffix, below in _sections(inner, definitions)]
    return found


def _merged(members: Sequence[Sequence[Key]], sections: Sequence[Mapping[str, Any]]) -> Iterator[Key]:
    """The keys of a union's members, those that several of them have alike only once; of its `type` one for all."""
    tags = [_tags(section) for section in sections]
    everyone = tuple(tag for names in tags for tag in names)
    owners: dict[Key, tuple[str, ...]] = {}
    kinds = []
    for keys, names in zip(members, tags, strict=True):
        for key in keys:
            if len(sections) > 1 and key.path.endswith(".type"):
                kinds.append(replace(key, meaning=f"{' | '.join(names)}: {key.meaning}"))
            else:
                owners[key] = owners.get(key, ()) + names
    if kinds:
        default = next((kind.default for kind in kinds if kind.default is not None), None)
        yield replace(
            kinds[0], type=" | ".join(everyone), default=default, meaning="\n".join(kind.meaning for kind in kinds)
        )
    for key, names in owners.items():
        yield key if names == everyone else replace(key, of_types=names)


def _tags(section: Mapping[str, Any]) -> tuple[str, ...]:
    kind = section.get("properties", {}).get("type", {})
    return (kind["const"],) if "const" in kind else tuple(kind.get("enum", ()))


def _parts(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The alternatives of a value, null left out, references looked up."""
    if "$ref" in node:
        return _parts(definitions[node["$ref"].rpartition("/")[2]], definitions)
    for union in ("anyOf", "oneOf"):
        if union in node:
            return [part for each in node[union] for part in _parts(each, definitions)]
    return [] if node.get("type") == "null" else [node]


def _type(node: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    return " or ".join(dict.fromkeys(_type_of(part) for part in _parts(node, definitions)))


def _type_of(part: Mapping[str, Any]) -> str:
    if "const" in part or "enum" in part:
        return " | ".join(map(str, part.get("enum", [part.get("const")])))
    if part.get("type") == "array":
        items = part.get("items", {})
        is_list_of_sections = "$ref" in items or "oneOf" in items
        return f"list of {'sections' if is_list_of_sections else _type_of(items) if 'type' in items else 'values'}"
    if "properties" in part:
        return "section"
    bounds = [f"{words} {json.dumps(part[bound])}" for bound, words in _BOUNDS if bound in part]
    return f"{_TYPES.get(part.get('type', ''), 'any value')}{' ' if bounds else ''}{' and '.join(bounds)}"


def _default(node: Mapping[str, Any]) -> str:
    """As YAML has it; a default made by a factory (a list, a mapping) is empty."""
    empty: list[str] | dict[str, str] = [] if node.get("type") == "array" or "anyOf" in node else {}
    return json.dumps(node.get("default", empty), ensure_ascii=False)
