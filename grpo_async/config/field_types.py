"""What may be written where: walks the annotations of the configuration's models along a path of keys; and what to write instead
of an unknown key.

A union that is told apart by `type` is walked with the keys of all its members until the type is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

from grpo_async.config.other_trainers import OTHER_NAMES
from grpo_async.config.yaml_document import KeyPath
from grpo_async.utils.text import CLOSE_ENOUGH, MAX_WORD, did_you_mean


@dataclass(frozen=True, slots=True)
class FieldType:
    """The types that one value may have: models, containers, plain types. `Annotated` and `| None` are looked through."""

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
        return {tag: model for model in self.models for tag in get_args(model.model_fields["type"].annotation)}

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

    def settings(self, prefix: str = "") -> Iterator[str]:
        """Every setting that can be written (no sections), as `--set` takes it; entry 0 stands for a list's entries."""
        for key in self.keys():
            below = self.below(key)
            assert below is not None
            if not below.models:
                yield prefix + key
            yield from below.settings(f"{prefix}{key}.")
        for alternative in self.alternatives:
            if get_origin(alternative) is list:
                yield from FieldType.of(get_args(alternative)[0]).settings(f"{prefix}0.")


def suggest_key(root: FieldType, path: KeyPath) -> str:
    """What to write instead of a path whose last key (or an earlier one) is unknown; empty without a good guess. A name of another
    trainer is known; else it is the nearest key of ours, in the same section first.

    num_generations    -> 'rollout.group_size'   what TRL calls it
    rollout.group_sise -> 'group_size'           a slip within the section: the key alone
    rollout.lr         -> 'optimizer.lr'         right key, wrong section: the whole path
    optim.lrr          -> 'optimizer.lr'
    """
    section, depth = root, 0
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
    return _anywhere(root, path[-1]) or near


def _anywhere(root: FieldType, last: str) -> str:
    """The setting of any section whose last key is nearest."""
    settings = {setting.rpartition(".")[2]: setting for setting in reversed(list(root.settings()))}
    near = get_close_matches(last, settings, n=1, cutoff=CLOSE_ENOUGH) if len(last) <= MAX_WORD else []
    return f"; did you mean '{settings[near[0]]}'?" if near else ""
