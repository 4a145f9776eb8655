"""What validation found, in the words of the person who wrote the file.

pydantic's errors name its own internals (union tags, "Value error,", model classes); here each becomes
`configs/x.yaml:9: inference.vllm.gpu_memory_utilization: input should be less than or equal to 1 (got 1.4)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from grpo_async.config.shape import Shape, did_you_mean, suggest_key
from grpo_async.config.tree import Node, Path, Place, Problems, shorten

_DOTTED = re.compile(r"\b[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+\b")
_MAPPING_TYPES = ("model_type", "model_attributes_type", "dict_type", "mapping_type")
_MOST_TOLD = 100  # looking for the nearest key takes 10 ms each


def to_plain(node: Node, shape: Shape | None) -> Any:
    """The tree as dicts and lists. A section whose `type` may be left out gets it: validation wants it spelled out."""
    if isinstance(node.value, dict):
        entries: dict[str, Any] = {}
        if shape is not None and shape.tag_key and shape.tag_key not in node.value and shape.default_tag:
            entries[shape.tag_key] = shape.default_tag
        for key, below in node.value.items():
            entries[key] = to_plain(below, shape.below(key) if shape else None)
        return entries
    if isinstance(node.value, list):
        return [to_plain(below, shape.below(str(i)) if shape else None) for i, below in enumerate(node.value)]
    return node.value


def report(error: ValidationError, root: Node, shape: Shape, problems: Problems) -> None:
    """Add every error of `error`, at the place that has to change. Values that were reported before are left out."""
    faults = error.errors(include_url=False)
    if len(faults) > _MOST_TOLD:
        problems.add(root.place, f"{len(faults)} values are wrong; told are the first {_MOST_TOLD}")
    for fault in faults[:_MOST_TOLD]:
        path, section = _path_of(fault["loc"], fault["type"], shape)
        if any(node is not None and node.broken for node in (root.find(path[:i]) for i in range(len(path) + 1))):
            continue
        for place, message in _explain(dict(fault), path, section, root, shape):
            problems.add(place, message)


def _path_of(loc: Sequence[int | str], kind: str, shape: Shape) -> tuple[Path, Shape]:
    """pydantic's location without its own segments, and the shape of the section that holds the last key.

    ('data', 'train', 'jsonl', 'path') -> ('data', 'train', 'path'): 'jsonl' is the union's tag, not a key.
    """
    path: list[str] = []
    section, current = shape, shape
    for position, raw in enumerate(loc):
        segment = str(raw)
        if segment in current.tags:
            current = current.narrowed(segment)
            continue
        below = current.below(segment)
        if below is not None:
            path.append(segment)
            section, current = current, below
        elif kind == "extra_forbidden" and position == len(loc) - 1:
            path.append(segment)
            section = current
    return tuple(path), section


def _explain(fault: dict[str, Any], path: Path, section: Shape, root: Node, shape: Shape) -> list[tuple[Place, str]]:
    kind, context, dotted = fault["type"], fault.get("ctx", {}), ".".join(path)
    place = root.nearest(path).place
    if kind == "extra_forbidden":
        return [(place, _unknown_key(path, section, root, shape))]
    if kind == "missing":
        return [(place, f"{dotted}: this key is required")]
    if kind in ("union_tag_invalid", "union_tag_not_found"):
        union = shape.find(path)
        assert union is not None
        types = list(union.tags)
        key, allowed = f"{dotted}.{union.tag_key}", f"one of {', '.join(repr(tag) for tag in types)}"
        if kind == "union_tag_not_found":
            return [(place, f"{key}: this key is required, {allowed}")]
        tag = str(context["tag"])
        place = root.nearest((*path, union.tag_key or "")).place
        return [(place, f"{key}: input should be {allowed} (got {tag!r}){did_you_mean(tag, types)}")]
    if kind == "value_error":
        return [_rule(line, dotted, place, root, shape) for line in str(context["error"]).splitlines() if line]
    message = (
        "input should be a mapping of keys" if kind in _MAPPING_TYPES else fault["msg"][:1].lower() + fault["msg"][1:]
    )
    hint = ""
    if kind == "string_type" and isinstance(fault["input"], int | float):
        hint = "; put it in quotes"
    if kind == "literal_error" and isinstance(fault["input"], str):
        hint = did_you_mean(fault["input"], re.findall(r"'([^']*)'", context["expected"]))
    return [(place, f"{dotted or 'the file'}: {message} (got {_shown(fault['input'])}){hint}")]


def _unknown_key(path: Path, section: Shape, root: Node, shape: Shape) -> str:
    key, dotted = path[-1], ".".join(path)
    union = shape.find(path[:-1])
    owners = [tag for tag, model in union.tags.items() if key in model.model_fields] if union else []
    if union is not None and owners:
        written = root.find((*path[:-1], union.tag_key or ""))
        own = written.value if written is not None else union.default_tag
        return f"unknown key '{dotted}' of type '{own}'; it belongs to type {' and '.join(repr(tag) for tag in owners)}"
    return f"unknown key '{dotted}'{did_you_mean(key, section.keys()) or suggest_key(shape, path)}"


def _rule(line: str, dotted: str, place: Place, root: Node, shape: Shape) -> tuple[Place, str]:
    """A rule's own message. It points at the first of the settings it names that is written somewhere."""
    named = [tuple(found.split(".")) for found in _DOTTED.findall(line)]
    known = [path for path in named if shape.find(path) is not None]
    written = [node for node in (root.find(path) for path in known) if node is not None]
    opens_with_path = bool(known) and line.startswith(".".join(known[0]) + ":")
    text = line if opens_with_path or not dotted else f"{dotted}: {line}"
    return (written[0].place if written and not dotted else place), text


def _shown(value: object) -> str:
    """A value in YAML's words, short."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list" if value else "an empty list"
    return shorten(repr(value))
