"""What validation found, in the words of the person who wrote the file.

pydantic's errors name its own internals (union tags, "Value error,", model classes); here each becomes
`configs/x.yaml:9: inference.vllm.gpu_memory_utilization: input should be less than or equal to 1 (got 1.4)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from grpo_async.config.field_types import FieldType, suggest_key
from grpo_async.config.yaml_document import Document, KeyPath, Location, Problems
from grpo_async.utils.text import clipped, did_you_mean

_DOTTED = re.compile(r"\b[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+\b")
_MAPPING_TYPES = ("model_type", "model_attributes_type", "dict_type", "mapping_type")
_MAX_REPORTED = 100  # looking for the nearest key takes 10 ms each


def report(error: ValidationError, document: Document, field_type: FieldType, problems: Problems) -> None:
    """Add every error of `error`, at the location that has to change. Values that were reported before are left out."""
    faults = error.errors(include_url=False)
    if len(faults) > _MAX_REPORTED:
        problems.add(document.location(()), f"{len(faults)} values are wrong; here are the first {_MAX_REPORTED}")
    for fault in faults[:_MAX_REPORTED]:
        path, section = _path_of(fault["loc"], fault["type"], field_type)
        if not any(path[:length] in document.broken for length in range(len(path) + 1)):
            for location, message in _explain(dict(fault), path, section, document, field_type):
                problems.add(location, message)


def _path_of(loc: Sequence[int | str], kind: str, field_type: FieldType) -> tuple[KeyPath, FieldType]:
    """pydantic's location without its own segments, and the type of the section that holds the last key.

    ('data', 'train', 'jsonl', 'path') -> ('data', 'train', 'path'): 'jsonl' is the union's tag, not a key.
    """
    path: list[str] = []
    section, current = field_type, field_type
    for position, segment in enumerate(map(str, loc)):
        if segment in current.tags:
            current = current.narrowed(segment)
        elif (below := current.below(segment)) is not None:
            path.append(segment)
            section, current = current, below
        elif kind == "extra_forbidden" and position == len(loc) - 1:
            path.append(segment)
            section = current
    return tuple(path), section


def _explain(
    fault: dict[str, Any], path: KeyPath, section: FieldType, document: Document, field_type: FieldType
) -> Iterator[tuple[Location, str]]:
    kind, context, dotted = fault["type"], fault.get("ctx", {}), ".".join(path)
    location = document.location(path)
    if kind == "extra_forbidden":
        yield location, _unknown_key(path, section, document, field_type)
    elif kind == "missing":
        yield location, f"{dotted}: this key is required"
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        union = field_type.find(path)
        assert union is not None
        one_of = f"one of {', '.join(map(repr, union.tags))}"
        if kind == "union_tag_not_found":
            yield location, f"{dotted}.type: this key is required, {one_of}"
        else:
            hint = did_you_mean(str(context["tag"]), list(union.tags))
            yield (
                document.location((*path, "type")),
                f"{dotted}.type: input should be {one_of} (got {context['tag']!r}){hint}",
            )
    elif kind == "value_error":
        yield from (
            _rule(line, dotted, document, path, field_type) for line in str(context["error"]).splitlines() if line
        )
    else:
        message, hint = fault["msg"][:1].lower() + fault["msg"][1:], ""
        if kind in _MAPPING_TYPES:
            message = "input should be a mapping of keys"
        if kind == "string_type" and isinstance(fault["input"], int | float):
            hint = "; put it in quotes"
        if kind == "literal_error" and isinstance(fault["input"], str):
            hint = did_you_mean(fault["input"], re.findall(r"'([^']*)'", context["expected"]))
        yield location, f"{dotted or 'the file'}: {message} (got {_shown(fault['input'])}){hint}"


def _unknown_key(path: KeyPath, section: FieldType, document: Document, field_type: FieldType) -> str:
    key, dotted, union = path[-1], ".".join(path), field_type.find(path[:-1])
    owners = [tag for tag, model in union.tags.items() if key in model.model_fields] if union else []
    if union is not None and owners:
        own = document.value(path[:-1]).get("type", union.default_tag)
        return f"unknown key '{dotted}' of type '{own}'; it belongs to type {' and '.join(map(repr, owners))}"
    return f"unknown key '{dotted}'{did_you_mean(key, section.keys()) or suggest_key(field_type, path)}"


def _rule(line: str, dotted: str, document: Document, path: KeyPath, field_type: FieldType) -> tuple[Location, str]:
    """A rule's own message. One that spans sections points at the first of the settings it names that is written somewhere."""
    known = [named for found in _DOTTED.findall(line) if field_type.find(named := tuple(found.split("."))) is not None]
    written = next((named for named in known if named in document.locations), path)
    opens_with_path = bool(known) and line.startswith(".".join(known[0]) + ":")
    return document.location(path or written), line if opens_with_path or not dotted else f"{dotted}: {line}"


def _shown(value: object) -> str:
    """A value in YAML's words, short."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return clipped(repr(value), 80)
