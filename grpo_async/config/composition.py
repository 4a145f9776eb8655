"""`extends`: a file on top of others. Mappings are merged key by key, everything else is replaced.

    extends: base.yaml            # or a list; later ones win; paths are relative to the file that says it

The place of a value is that of the file it came from. A section that is told apart by `type` starts afresh when the
type changes: keys of another type would only be unknown ones.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path as FilePath

from grpo_async.config.interpolation import interpolate
from grpo_async.config.shape import Shape
from grpo_async.config.tree import Node, Place, Problems
from grpo_async.config.yaml_source import read_yaml_file

_MOST_FILES = 30


def read_with_bases(path: FilePath, shape: Shape, environment: Mapping[str, str], problems: Problems) -> Node | None:
    """The merged tree of a file and everything it extends; None when a file could not be read (then reported)."""
    root = _Composer(shape, environment, problems).read(path, [])
    return None if problems.unreadable else root


class _Composer:
    def __init__(self, shape: Shape, environment: Mapping[str, str], problems: Problems) -> None:
        self._shape, self._environment, self._problems = shape, environment, problems
        self._num_read = 0

    def read(self, path: FilePath, inside: list[FilePath]) -> Node | None:
        """`inside`: the files that led here, outermost first; meeting one of them again is a circle."""
        self._num_read += 1
        own = read_yaml_file(path, self._problems)
        if own is None:
            return None
        assert isinstance(own.value, dict)
        merged = Node(value={}, place=own.place)
        for base in self._bases(own, path, [*inside, path]):
            below = self.read(base, [*inside, path])
            if below is not None:
                merged = merge(merged, below, self._shape)
        rest = Node(value={key: node for key, node in own.value.items() if key != "extends"}, place=own.place)
        return merge(merged, rest, self._shape)

    def _bases(self, own: Node, path: FilePath, chain: list[FilePath]) -> list[FilePath]:
        written = own.child("extends")
        if written is None:
            return []
        written = interpolate(written, self._environment, self._problems, ("extends",))
        bases = []
        for entry in written.value if isinstance(written.value, list) else [written]:
            if not isinstance(entry.value, str):
                if not entry.broken:
                    self._fail(entry.place, "extends: give the name of a file, or a list of names")
                self._problems.unreadable = True
                continue
            base = FilePath(os.path.normpath(path.parent / os.path.expanduser(entry.value)))
            try:
                fault = self._fault_of(base, path, chain)
            except OSError as error:  # a name that is too long, a folder that may not be entered
                fault = f"extends: {base} cannot be read: {error.strerror}"
            if fault:
                self._fail(entry.place, fault)
            else:
                bases.append(base)
        return bases

    def _fault_of(self, base: FilePath, path: FilePath, chain: list[FilePath]) -> str:
        """Why `base` cannot stand in `extends` of `path`; empty: it can."""
        if base.resolve() in [file.resolve() for file in chain]:
            return f"extends goes in a circle: {' -> '.join(str(file) for file in [*chain, base])}"
        if not base.is_file():
            return f"extends: there is no file {base} (paths are relative to {path})"
        if self._num_read >= _MOST_FILES:
            return f"extends: more than {_MOST_FILES} files are read, one of them perhaps on many ways; extend fewer"
        return ""

    def _fail(self, place: Place, message: str) -> None:
        self._problems.add(place, message)
        self._problems.unreadable = True


def merge(below: Node, above: Node, shape: Shape | None) -> Node:
    """`above` on top of `below`: {a: {b: 1, c: 2}} under {a: {c: 3}} -> {a: {b: 1, c: 3}}."""
    if not (isinstance(below.value, dict) and isinstance(above.value, dict)):
        return above
    if shape is not None and shape.tag_key is not None and shape.tag_key in above.value:
        default = Node(value=shape.default_tag, place=below.place)
        if below.value.get(shape.tag_key, default).value != above.value[shape.tag_key].value:
            return above
    entries = dict(below.value)
    for key, node in above.value.items():
        entries[key] = merge(entries[key], node, shape.below(key) if shape else None) if key in entries else node
    return Node(value=entries, place=above.place)
