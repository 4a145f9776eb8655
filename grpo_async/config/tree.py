"""A configuration as it was written: every value with the file and line (or the `--set`) that it came from.

Nodes are immutable in use: merging, overriding and interpolating make new ones, so a place survives all of them
and an error points at the line that must change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

Scalar: TypeAlias = str | int | float | bool | None
Path: TypeAlias = tuple[str, ...]
"""Keys and list indices from the root, all as text: ("rewards", "0", "weight")."""
_MOST_DIGITS = 9


def index_of(key: str) -> int | None:
    """The index of a list entry that a key of a path means: "12" -> 12; None for anything else, such as "²" or 5,000 digits."""
    return int(key) if key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS else None


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was written: `configs/x.yaml:3`, or `--set a.b=c` (then without a line)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One value. A value of a mapping stands at the line of its key."""

    value: Scalar | list[Node] | dict[str, Node]
    place: Place
    quoted: bool = False  # text in quotes (or a block): never read as a number
    broken: bool = False  # already reported; whatever validation says about it is noise

    def child(self, key: str) -> Node | None:
        """The value under `key`, or the list entry with this index; None when there is none."""
        if isinstance(self.value, dict):
            return self.value.get(key)
        index = index_of(key)
        if isinstance(self.value, list) and index is not None and index < len(self.value):
            return self.value[index]
        return None

    def find(self, path: Sequence[str]) -> Node | None:
        """The node at `path`, or None."""
        node: Node | None = self
        for key in path:
            node = node.child(key) if node is not None else None
        return node

    def nearest(self, path: Sequence[str]) -> Node:
        """The node at `path`, or the deepest one above it that exists: where a missing key would have to be added."""
        node = self
        for key in path:
            below = node.child(key)
            if below is None:
                break
            node = below
        return node


class Problems:
    """Collects what is wrong, so that everything is reported at once.

    `unreadable` is set when a file could not be read at all; then validation would only complain about what it held.
    """

    def __init__(self) -> None:
        self.unreadable = False
        self._found: list[tuple[Place, str]] = []
        self._sources: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def read(self, source: str) -> None:
        """Note that `source` was read: problems are listed in the order of reading."""
        if source not in self._sources:
            self._sources.append(source)

    def add(self, place: Place, message: str) -> None:
        self.read(place.source)
        self._found.append((place, message))

    def text(self) -> str:
        """One problem a line, by source and line."""
        ordered = sorted(self._found, key=lambda found: (self._sources.index(found[0].source), found[0].line or 0))
        return "\n".join(dict.fromkeys(f"{place}: {message}" for place, message in ordered))
