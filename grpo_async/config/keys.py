"""Every key of a configuration, by the annotations of the models: its type, range, default and meaning (`all_keys`), what to write
instead of an unknown one (`suggest_key`), and the JSON schema, for editors (`schema_text`)."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.names import OTHER_NAMES, REMOVED
from grpo_async.config.yaml_file import KeyPath
from grpo_async.utils.text import did_you_mean, nearest

_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "text", dict: "mapping"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key.

    Attributes:
        path: `rollout.group_size`; an entry of a list is `rewards[].function`, of a mapping `environments.NAME.factory`.
        of_types: values of the section's `type` that have this key; empty where all do, or there is no `type`.
        default: in YAML syntax; None where the key must be given, or is a section.
        meaning: one line, of `type` one for each of its values.
        tells_types: it is the `type` that tells the members of a union apart.
    """

    path: str
    type: str
    default: str | None
    is_section: bool
    meaning: str
    of_types: tuple[str, ...] = ()
    tells_types: bool = False

    @property
    def parts(self) -> list[str]:
        """The path; 0 stands for any entry of a list: ["rewards", "0", "function"]."""
        return self.path.replace("[]", ".0").split(".")

    @property
    def elsewhere(self) -> str:
        """What other trainers call it: "num_generations (TRL), rollout.n (verl)"; empty where nobody has it."""
        return ", ".join(f"{other.name} ({other.trainer})" for other in OTHER_NAMES if other.here == self.path)

    @property
    def summary(self) -> str:
        end = "" if self.is_section else "; required" if self.default is None else f"; default {self.default}"
        only = f" (with type {' or '.join(self.of_types)})" if self.of_types else ""
        return f"{self.type}{end}{only}"


@functools.cache
def all_keys() -> tuple[Key, ...]:
    return tuple(_keys(ExperimentConfig, ""))


def keys_at(path: KeyPath) -> list[Key]:
    """The key that a path leads to; several where the members of a union differ in it."""
    return [key for key in all_keys() if _fits(key.parts, path)]


def find_keys(word: str) -> list[Key]:
    """The key with this path, with those within it; else those whose path, or whose old or other trainers' name, is this word or
    ends in it; else those that contain all the words, in path, meaning or other names."""
    path = [part for part in word.replace("[]", "").split(".") if not part.isdecimal()]
    named = {other.here for other in OTHER_NAMES if f".{other.name}".endswith(f".{word.lstrip('-')}")}
    plain = {key: [part for part in key.parts if part != "0"] for key in all_keys()}
    if exact := [key for key, parts in plain.items() if _fits(parts[: len(path)], path)]:
        return exact
    if ends := [key for key, parts in plain.items() if parts[-len(path) :] == path or key.path in named]:
        return ends
    words = word.lower().split()
    texts = {key: f"{key.path} {key.meaning} {key.elsewhere}".lower() for key in all_keys()}
    return [key for key, text in texts.items() if all(part in text for part in words)]


def _fits(known: Sequence[str], parts: Sequence[str]) -> bool:
    """Whether a path leads to the key with these parts."""
    if len(known) != len(parts):
        return False
    pairs = zip(known, parts, strict=True)
    return all(name in ("NAME", part) or (name == "0" and part.isdecimal()) for name, part in pairs)


def _keys(model: type[BaseModel], prefix: str) -> Iterator[Key]:
    for name, field in model.model_fields.items():
        path, sections = prefix + name, _sections(field.annotation)
        has_default = not sections and not field.is_required()
        default = field.get_default(call_default_factory=True)
        yield Key(
            path=path,
            type=_type(field.annotation, field.metadata),
            default=json.dumps(default, default=str, ensure_ascii=False) if has_default else None,
            is_section=bool(sections),
            meaning=" ".join((field.description or "").split()),
        )
        for place in dict.fromkeys(suffix for suffix, _ in sections):
            below = [section for suffix, section in sections if suffix == place]
            yield from _merged([(_tags(section), list(_keys(section, f"{path}{place}."))) for section in below])


def _sections(annotation: Any) -> list[tuple[str, type[BaseModel]]]:
    """The models that a value may be, hold as the entries of a list, or as the values of a mapping: ("[]", ToolSection)."""
    found: list[tuple[str, type[BaseModel]]] = []
    for alternative in _alternatives(annotation):
        if isinstance(alternative, type) and issubclass(alternative, BaseModel):
            found.append(("", alternative))
        elif (origin := get_origin(alternative)) in (list, dict):
            mark = "[]" if origin is list else ".NAME"
            found += [(mark + suffix, below) for suffix, below in _sections(get_args(alternative)[-1])]
    return found


def _alternatives(annotation: Any) -> list[Any]:
    """The types that a value may have; `Annotated` and `| None` are looked through."""
    if get_origin(annotation) is Annotated:
        return _alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, UnionType):
        return [each for part in get_args(annotation) if part is not NoneType for each in _alternatives(part)]
    return [annotation]


def _merged(members: Sequence[tuple[tuple[str, ...], Sequence[Key]]]) -> Iterator[Key]:
    """The keys of a union's members (the values of `type` of each, and its keys), those that several of them have alike only once;
    of its `type` one for all."""
    everyone = tuple(tag for tags, _ in members for tag in tags)
    owners: dict[Key, tuple[str, ...]] = {}
    kinds = []
    for tags, keys in members:
        for key in keys:
            if len(members) > 1 and key.path.endswith(".type"):
                kinds.append(replace(key, meaning=f"{' | '.join(tags)}: {key.meaning}"))
            else:
                owners[key] = owners.get(key, ()) + tags
    if kinds:
        default = next((kind.default for kind in kinds if kind.default is not None), None)
        meaning = "\n".join(kind.meaning for kind in kinds)
        yield replace(kinds[0], type=" | ".join(everyone), default=default, meaning=meaning, tells_types=True)
    for key, tags in owners.items():
        yield key if tags == everyone else replace(key, of_types=tags)


def _tags(model: type[BaseModel]) -> tuple[str, ...]:
    """What `type` may be in a model; empty where it has none."""
    return get_args(model.model_fields["type"].annotation) if "type" in model.model_fields else ()


def _type(annotation: Any, metadata: Sequence[Any] = ()) -> str:
    """ "whole number at least 1", "gloo | nccl", "list of text or all-linear"."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0], [*metadata, *(each for part in arguments for each in getattr(part, "metadata", ()))])
    if origin in (Union, UnionType):
        return " or ".join(dict.fromkeys(_type(part, metadata) for part in arguments if part is not NoneType))
    if origin is Literal:
        return " | ".join(arguments)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    if origin in (list, tuple):
        return f"list of {'sections' if _sections(arguments[0]) else _type(arguments[0])}"
    bounds = [
        f"{words} {json.dumps(getattr(each, name))}"
        for name, words in _BOUNDS.items()
        for each in metadata
        if hasattr(each, name)
    ]
    return f"{_TYPES.get(origin or annotation, 'any value')}{' ' if bounds else ''}{' and '.join(bounds)}"


def suggest_key(path: KeyPath) -> str:
    """What to write instead of a path whose last key (or an earlier one) is unknown; empty without a good guess. A name of another
    trainer is known; else it is the nearest key of ours, in the same section first.

    num_generations    -> 'rollout.group_size'   what TRL calls it
    rollout.group_sise -> 'group_size'           a typo within the section: the key alone
    rollout.lr         -> 'optimizer.lr'         right key, wrong section: the whole path
    optim.lrr          -> 'optimizer.lr'
    """
    dotted = ".".join(path)
    if gone := next((why for old, why in REMOVED.items() if f"{dotted}.".startswith(f"{old}.")), None):
        return f"; it {gone}"
    known = [any(_fits(key.parts[:length], path[:length]) for key in all_keys()) for length in range(1, len(path))]
    depth = known.index(False) if False in known else len(path) - 1
    near = did_you_mean(path[depth], [key.parts[-1] for key in all_keys() if _fits(key.parts[:-1], path[:depth])])
    if near and depth == len(path) - 1:
        return near
    for other in OTHER_NAMES:
        if other.name in (path[-1], dotted):
            return f"; here it is '{other.here}'" if other.here else f"; it {other.why}"
    # the setting of any section whose last key is nearest, with the shortest path; entry 0 of a list is any entry
    keys = sorted(all_keys(), key=lambda key: len(key.parts))
    settings = {key.parts[-1]: ".".join(key.parts) for key in reversed(keys) if not key.is_section}
    anywhere = nearest(path[-1], settings)
    return f"; did you mean '{settings[anywhere[0]]}'?" if anywhere else near


# ---- the JSON schema ----

_EXTENDS = {
    "title": "Extends",
    "description": "Files (relative to this one) that this file is merged over: one name or a list; later ones win.",
    "anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}],
}


def config_schema() -> dict[str, Any]:
    """JSON schema (draft 2020-12) of what `load_config` reads: pydantic's, but with `extends`, and a file that extends another may
    leave out what the other says."""
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
    return json.dumps(config_schema(), indent=2, ensure_ascii=False) + "\n"
