"""Every key of a configuration, by the annotations of the models: its type, range, default and meaning (`all_keys`), what may be
written where (`FieldType`), and what to write instead of an unknown key (`suggest_key`)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.names import OTHER_NAMES
from grpo_async.config.yaml_document import KeyPath
from grpo_async.utils.text import did_you_mean, nearest

_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
_TYPES = {int: "whole number", float: "number", bool: "true or false", str: "text", Path: "text", dict: "mapping"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """One key.

    Attributes:
        path: `rollout.group_size`; an entry of a list is `rewards[].function`, of a mapping `environments.NAME.factory`.
        of_types: values of the section's `type` that have this key; empty where all do.
        default: in YAML syntax; None where the key must be given, or is a section.
        meaning: one line, of `type` one for each of its values.
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


@functools.cache
def all_keys() -> tuple[Key, ...]:
    """Every key, in the order of the sections."""
    return tuple(_keys(ExperimentConfig, ""))


def find_keys(keys: Sequence[Key], word: str) -> list[Key]:
    """The key with this path; else those whose path, or whose old or other trainers' name, is this word or ends in it; else those
    that contain all the words, in path, meaning or other names."""
    bare = re.sub(r"\.[0-9]+(?=\.|$)|\[\]", "", word)
    named = {other.here for other in OTHER_NAMES if f".{other.name}".endswith(f".{word.lstrip('-')}")}
    named.update(renamed_keys(word).values())
    if exact := [key for key in keys if re.fullmatch(_plain(key).replace("NAME", "[^.]+"), bare)]:
        return exact
    if ends := [key for key in keys if _plain(key).endswith(f".{bare}") or key.path in named]:
        return ends
    words = word.lower().split()
    return [key for key in keys if all(part in f"{key.path} {key.meaning} {key.elsewhere}".lower() for part in words)]


def siblings(keys: Sequence[Key], key: Key) -> list[Key]:
    """The other keys of its section, or those within it."""
    above = [f"{key.path}{mark}." for mark in ("", "[]", ".NAME")] if key.is_section else [_parent(key.path)]
    return [other for other in keys if _parent(other.path) in above and other != key]


def _plain(key: Key) -> str:
    return key.path.replace("[]", "")


def _parent(path: str) -> str:
    return path.rpartition(".")[0] + "."


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
        yield from _merged([(_tags(below), list(_keys(below, f"{path}{suffix}."))) for suffix, below in sections])


def _sections(annotation: Any) -> list[tuple[str, type[BaseModel]]]:
    """The models that a value may be, hold as the entries of a list, or as the values of a mapping: ("[]", ToolSection)."""
    field_type = FieldType.of(annotation)
    found = [("", model) for model in field_type.models]
    for alternative in field_type.alternatives:
        if (origin := get_origin(alternative)) in (list, dict):
            mark = "[]" if origin is list else ".NAME"
            found += [(mark + suffix, below) for suffix, below in _sections(get_args(alternative)[-1])]
    return found


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
        yield replace(
            kinds[0], type=" | ".join(everyone), default=default, meaning="\n".join(kind.meaning for kind in kinds)
        )
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
    if FieldType.of(annotation).models:
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


# ---- what may be written where ----


@dataclass(frozen=True, slots=True)
class FieldType:
    """The types that one value may have: models, containers, plain types. `Annotated` and `| None` are looked through. A union that
    is told apart by `type` has the keys of all its members until the type is known."""

    alternatives: tuple[Any, ...]

    @classmethod
    def of(cls, annotation: Any) -> FieldType:
        if get_origin(annotation) is Annotated:
            return cls.of(get_args(annotation)[0])
        if get_origin(annotation) in (Union, UnionType):
            parts = [cls.of(part) for part in get_args(annotation) if part is not NoneType]
            return cls(tuple(alternative for part in parts for alternative in part.alternatives))
        return cls((annotation,))

    @property
    def models(self) -> list[type[BaseModel]]:
        return [each for each in self.alternatives if isinstance(each, type) and issubclass(each, BaseModel)]

    @property
    def tags(self) -> dict[str, type[BaseModel]]:
        """type -> model, of a union of models; empty otherwise."""
        if len(self.models) < 2:
            return {}
        return {tag: model for model in self.models for tag in _tags(model)}

    @property
    def default_tag(self) -> str | None:
        """The type that is meant when none is written: that of the member whose `type` has a default."""
        return next((tag for tag, model in self.tags.items() if model.model_fields["type"].default == tag), None)

    def keys(self) -> list[str]:
        """Known keys, of all members of a union."""
        return list(dict.fromkeys(name for model in self.models for name in model.model_fields))

    def below(self, key: str) -> FieldType | None:
        """The type under a key or list index; None when nothing can stand there."""
        is_index, found = key.isascii() and key.isdecimal(), []
        for alternative in self.alternatives:
            origin, arguments = get_origin(alternative), get_args(alternative)
            if alternative is Any:
                found.append(Any)
            elif alternative in self.models and key in alternative.model_fields:
                found.append(alternative.model_fields[key].annotation)
            elif origin is dict:
                found.append(arguments[1])
            elif origin is list and is_index:
                found.append(arguments[0])
            elif origin is tuple and key in map(str, range(len(arguments))):
                found.append(arguments[int(key)])
        return FieldType(tuple(each for part in found for each in FieldType.of(part).alternatives)) if found else None

    def find(self, path: KeyPath) -> FieldType | None:
        field_type: FieldType | None = self
        for key in path:
            field_type = field_type.below(key) if field_type is not None else None
        return field_type


ROOT = FieldType.of(ExperimentConfig)

RENAMED: dict[KeyPath, KeyPath] = {
    ("data", "train", "drop"): ("data", "train", "remove_columns"),
    ("evaluation", "data", "drop"): ("evaluation", "data", "remove_columns"),
    ("evaluation", "pass_reward"): ("evaluation", "pass_threshold"),
    ("evaluation", "samples"): ("evaluation", "samples_per_prompt"),
    ("model", "chat_template_arguments"): ("model", "chat_template_kwargs"),
    ("optimizer", "schedule_arguments"): ("optimizer", "schedule_kwargs"),
    ("record", "rollouts", "token_figures"): ("record", "rollouts", "token_stats"),
}
"""Old path -> new path. The old one is accepted, with a warning, until the next version."""

REMOVED: dict[KeyPath, str] = {
    (
        "inference",
        "tls",
    ): "is gone: a reverse proxy in front of a server adds TLS; inference.urls takes https addresses",
    ("data", "reasoning_gym"): "is gone: docs/howto/reward.md has a generator and a reward for it",
    ("evaluation", "reasoning_gym"): "is gone: docs/howto/reward.md has a generator and a reward for it",
    (
        "launch",
        "nodes",
    ): "is gone: several machines are a Ray cluster; set launch.ray: auto, launch.trainer_nodes (the machines that "
    "train) and inference.replicas (all servers)",
    ("launch", "rdzv"): "is gone: with launch.ray the machines find each other",
    ("launch", "rdzv_timeout_s"): "is gone: with launch.ray it is launch.placement_timeout_s",
    ("launch", "slurm"): "is gone: docs/howto/slurm.md has a batch script, whose options stand in its head",
    ("launch", "kubernetes"): "is gone: docs/howto/kubernetes.md has a manifest",
    (
        "rollout",
        "agent",
        "sandbox",
    ): "is gone: an agent that runs what a model wrote belongs in a container, see docs/howto/agent.md",
    (
        "rollout",
        "agent",
        "read_paths",
    ): "is gone with `sandbox`: mount what a container is to read, see docs/howto/agent.md",
    ("tracking", "mlflow"): "is gone: docs/howto/inspect.md shows how to send metrics.jsonl to MLflow",
}
"""Path, or list and type of its entries -> what to do instead. Each is told for one version."""


def renamed_keys(word: str) -> dict[str, str]:
    """Old path -> new path, of the keys whose old path is this word or ends in it."""
    paths = {".".join(old): ".".join(new) for old, new in RENAMED.items() if ROOT.find(old) is None}
    return {old: new for old, new in paths.items() if f".{old}".endswith(f".{word}")}


def suggest_key(path: KeyPath) -> str:
    """What to write instead of a path whose last key (or an earlier one) is unknown; empty without a good guess. A name of another
    trainer is known; else it is the nearest key of ours, in the same section first.

    num_generations    -> 'rollout.group_size'   what TRL calls it
    rollout.group_sise -> 'group_size'           a typo within the section: the key alone
    rollout.lr         -> 'optimizer.lr'         right key, wrong section: the whole path
    optim.lrr          -> 'optimizer.lr'
    """
    if gone := next((why for old, why in REMOVED.items() if path[: len(old)] == old), None):
        return f"; it {gone}"
    section, depth = ROOT, 0
    while (below := section.below(path[depth])) is not None:
        section, depth = below, depth + 1
    if depth and not section.keys():
        return f"; did you mean '{'.'.join(path[:depth])}'?"
    near = did_you_mean(path[depth], section.keys())
    if near and depth == len(path) - 1:
        return near
    for other in OTHER_NAMES:
        if other.name in (path[-1], ".".join(path)):
            return f"; here it is '{other.here}'" if other.here else f"; it {other.why}"
    return _anywhere(path[-1]) or near


def _anywhere(last: str) -> str:
    """The setting of any section whose last key is nearest; entry 0 of a list is any entry."""
    paths = [key.path.replace("[]", ".0") for key in all_keys() if not key.is_section]
    settings = {path.rpartition(".")[2]: path for path in reversed(paths)}
    near = nearest(last, settings)
    return f"; did you mean '{settings[near[0]]}'?" if near else ""
