"""What may be written where: walks the annotations of the configuration's models along a path of keys.

A union that is told apart by `type` is walked with the keys of all its members until the type is known.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from grpo_async.config.tree import index_of


@dataclass(frozen=True, slots=True)
class Shape:
    """The alternatives of one value. `tag_key` is the key that tells them apart, for unions on `type`."""

    alternatives: tuple[Any, ...]
    tag_key: str | None = None

    @classmethod
    def of(cls, annotation: Any, tag_key: str | None = None) -> Shape:
        """The shape of an annotation: `Annotated` and `| None` are looked through."""
        if get_origin(annotation) is Annotated:
            base, *extras = get_args(annotation)
            for extra in extras:
                if isinstance(extra, FieldInfo) and isinstance(extra.discriminator, str):
                    tag_key = extra.discriminator
            return cls.of(base, tag_key)
        if get_origin(annotation) in (Union, UnionType):
            parts = [cls.of(part, tag_key) for part in get_args(annotation) if part is not NoneType]
            keys = {part.tag_key for part in parts if part.tag_key}
            return cls(tuple(a for part in parts for a in part.alternatives), keys.pop() if keys else None)
        return cls((annotation,), tag_key)

    @property
    def models(self) -> list[type[BaseModel]]:
        return [a for a in self.alternatives if isinstance(a, type) and issubclass(a, BaseModel)]

    @property
    def tags(self) -> dict[str, type[BaseModel]]:
        """type -> model, for a union on `type`; empty otherwise."""
        if self.tag_key is None:
            return {}
        found = {}
        for model in self.models:
            field = model.model_fields[self.tag_key]
            found.update({str(tag): model for tag in get_args(field.annotation)})
        return found

    @property
    def default_tag(self) -> str | None:
        """The type that is meant when none is written: that of the one member whose `type` has a default."""
        defaults = [tag for tag, model in self.tags.items() if model.model_fields[self.tag_key or ""].default == tag]
        return defaults[0] if len(defaults) == 1 else None

    def narrowed(self, tag: object) -> Shape:
        """The member of the union with this type; the whole union when there is none."""
        model = self.tags.get(str(tag))
        return Shape((model,)) if model is not None else self

    def keys(self) -> list[str]:
        """Known keys, of all members of a union."""
        return list(dict.fromkeys(name for model in self.models for name in model.model_fields))

    def below(self, key: str) -> Shape | None:
        """The shape under a key or list index; None when nothing can stand there."""
        parts: list[Shape] = []
        for alternative in self.alternatives:
            origin, arguments = get_origin(alternative), get_args(alternative)
            if alternative is Any:
                parts.append(Shape((Any,)))
            elif isinstance(alternative, type) and issubclass(alternative, BaseModel):
                if key in alternative.model_fields:
                    parts.append(_of_field(alternative.model_fields[key]))
            elif origin is dict:
                parts.append(Shape.of(arguments[1]))
            elif origin is list and index_of(key) is not None:
                parts.append(Shape.of(arguments[0]))
            elif origin is tuple and (index := index_of(key)) is not None and index < len(arguments):
                parts.append(Shape.of(arguments[index]))
        if not parts:
            return None
        tag_key = next((part.tag_key for part in parts if part.tag_key), None)
        return Shape(tuple(a for part in parts for a in part.alternatives), tag_key)

    def find(self, path: tuple[str, ...]) -> Shape | None:
        shape: Shape | None = self
        for key in path:
            shape = shape.below(key) if shape is not None else None
        return shape

    def dotted_paths(self, prefix: str = "") -> Iterator[str]:
        """Every key that can be written, as `--set` takes it; entry 0 stands for a list's entries."""
        for key in self.keys():
            below = self.below(key)
            assert below is not None
            yield prefix + key
            yield from below.dotted_paths(f"{prefix}{key}.")
        for alternative in self.alternatives:
            if get_origin(alternative) is list:
                yield from Shape.of(get_args(alternative)[0]).dotted_paths(f"{prefix}0.")


def _of_field(field: FieldInfo) -> Shape:
    # pydantic lifts the outermost Annotated of a field into its FieldInfo
    return Shape.of(field.annotation, field.discriminator if isinstance(field.discriminator, str) else None)
