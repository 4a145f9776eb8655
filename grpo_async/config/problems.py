"""What validation found, in the words of the person who wrote the file.

pydantic's errors name its own internals (union tags, "Value error,", model classes); here each becomes
`configs/x.yaml:9: inference.vllm.gpu_memory_utilization: input should be less than or equal to 1 (got 1.4)`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from pydantic import ValidationError

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.field_types import FieldType, suggest_key
from grpo_async.config.yaml_document import KeyPath, Node, Problem
from grpo_async.utils.text import clipped, did_you_mean

_ROOT = FieldType.of(ExperimentConfig)
_DOTTED = re.compile(r"\b[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+\b")
_MAX_REPORTED = 100  # looking for the nearest key takes 10 ms each


def explained(error: ValidationError, root: Node) -> Iterator[Problem]:
    """Every error at the location that has to change. Values that cannot be used anyway are left out."""
    faults = error.errors(include_url=False)
    if len(faults) > _MAX_REPORTED:
        yield root.location, f"{len(faults)} values are wrong; here are the first {_MAX_REPORTED}"
    for fault in faults[:_MAX_REPORTED]:
        path = _path_of(fault["loc"], fault["type"])
        if not any(node.fault for node in root.along(path)):
            yield from _explain(dict(fault), path, root)


def _path_of(loc: Sequence[int | str], kind: str) -> KeyPath:
    """pydantic's location without the tags of unions: ('data', 'train', 'jsonl', 'path') -> ('data', 'train', 'path')."""
    path: list[str] = []
    current = _ROOT
    for position, segment in enumerate(map(str, loc)):
        if segment in current.tags:
            current = FieldType((current.tags[segment],))
        elif (below := current.below(segment)) is not None:
            path.append(segment)
            current = below
        elif kind == "extra_forbidden" and position == len(loc) - 1:
            path.append(segment)
    return tuple(path)


def _explain(fault: dict[str, Any], path: KeyPath, root: Node) -> Iterator[Problem]:
    kind, context, dotted = fault["type"], fault.get("ctx", {}), ".".join(path)
    location, found = root.nearest(path), _ROOT.find(path)
    tags = list(found.tags) if found else []
    match kind:
        case "extra_forbidden":
            yield location, _unknown_key(path, root)
        case "missing":
            yield location, f"{dotted}: this key is required"
        case "union_tag_not_found":
            yield location, f"{dotted}.type: this key is required, one of {', '.join(map(repr, tags))}"
        case "union_tag_invalid":
            hint = did_you_mean(str(context["tag"]), tags)
            message = f"input should be one of {', '.join(map(repr, tags))} (got {context['tag']!r}){hint}"
            yield root.nearest((*path, "type")), f"{dotted}.type: {message}"
        case "value_error":
            yield from (_rule(line, path, root) for line in str(context["error"]).splitlines() if line)
        case _:
            message, hint = fault["msg"][:1].lower() + fault["msg"][1:], ""
            if kind in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
                message = "input should be a mapping of keys"
            if kind == "string_type" and isinstance(fault["input"], int | float):
                hint = "; put it in quotes"
            if kind == "literal_error" and isinstance(fault["input"], str):
                hint = did_you_mean(fault["input"], re.findall(r"'([^']*)'", context["expected"]))
            yield location, f"{dotted or 'the file'}: {message} (got {_shown(fault['input'])}){hint}"


def _unknown_key(path: KeyPath, root: Node) -> str:
    key, dotted, union, section = path[-1], ".".join(path), _ROOT.find(path[:-1]), root.at(path[:-1])
    owners = [tag for tag, model in union.tags.items() if key in model.model_fields] if union else []
    if union is not None and section is not None and owners:
        own = section.plain().get("type", union.default_tag)
        return f"unknown key '{dotted}' of type '{own}'; it belongs to type {' and '.join(map(repr, owners))}"
    return f"unknown key '{dotted}'{suggest_key(_ROOT, path)}"


def _rule(line: str, path: KeyPath, root: Node) -> Problem:
    """A rule's own message. One that spans sections points at the first of the settings it names that is written somewhere."""
    known = [named for found in _DOTTED.findall(line) if _ROOT.find(named := tuple(found.split("."))) is not None]
    written = next((named for named in known if root.at(named) is not None), path)
    opens_with_path = bool(known) and line.startswith(".".join(known[0]) + ":")
    message = line if opens_with_path or not path else f"{'.'.join(path)}: {line}"
    return root.nearest(path or written), message


def _shown(value: object) -> str:
    """A value in YAML's words, short."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list" if value else "an empty list"
    return clipped(repr(value), 80)
