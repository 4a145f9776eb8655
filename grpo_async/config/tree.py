"""A configuration as it was written: every value with the file and line (or the `--set`) that it came from.

PyYAML parses; the meaning of scalars is that of YAML 1.2, because PyYAML's is YAML 1.1: it reads `1e-6` as text, `on` as true and
`010` as 8. It also takes the last of two equal keys without a word; here that is a problem naming both lines. Tags of one's own
and merge keys (`<<`) are refused: `extends` is the one way to share settings.

Nodes are immutable in use: merging, overriding and interpolating make new ones, so a place survives all of them and an error
points at the line that must change.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath
from typing import TypeAlias

import yaml

Scalar: TypeAlias = str | int | float | bool | None
Path: TypeAlias = tuple[str, ...]
"""Keys and list indices from the root, all as text: ("rewards", "0", "weight")."""
_MOST_VALUES = 20_000  # of a configuration, aliases unfolded
_MOST_DIGITS = 24  # enough for 64 bits in every notation; int() refuses thousands of them in words of its own
_LONGEST_SHOWN = 80
_UNUSABLE = re.compile("[\x00\ud800-\udfff]")  # no file name, process or encoder takes them
_PREFIX = "tag:yaml.org,2002:"
YAML_1_2_RULES: tuple[tuple[str, re.Pattern[str], list[str]], ...] = (
    (_PREFIX + "null", re.compile(r"^(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""]),
    (_PREFIX + "bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")),
    (_PREFIX + "int", re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$"), list("-+0123456789")),
    (
        _PREFIX + "float",
        re.compile(
            r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
            r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
        ),
        list("-+.0123456789"),
    ),
)


def index_of(key: str) -> int | None:
    """The index of a list entry that a key of a path means: "12" -> 12; None for anything else, such as "²" or 5,000 digits."""
    return int(key) if key.isascii() and key.isdecimal() and len(key) <= _MOST_DIGITS else None


def shorten(text: str, longest: int = _LONGEST_SHOWN) -> str:
    """`text` as it is shown in a message: "...", where it was longer."""
    return text if len(text) <= longest else text[: longest - 3] + "..."


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

    def add(self, place: Place, message: str, *, unreadable: bool = False) -> None:
        self.read(place.source)
        self._found.append((place, message))
        self.unreadable |= unreadable

    def broken(self, place: Place, path: Path, message: str) -> Node:
        """Add a problem of the value at `path`; the node that stands for it."""
        self.add(place, f"{'.'.join(path)}: {message}" if path else message)
        return Node(value=None, place=place, broken=True)

    def text(self) -> str:
        """One problem a line, by source and line."""
        ordered = sorted(self._found, key=lambda found: (self._sources.index(found[0].source), found[0].line or 0))
        return "\n".join(dict.fromkeys(f"{place}: {message}" for place, message in ordered))


def read_yaml_file(path: FilePath, problems: Problems) -> Node | None:
    """The root mapping of a file; None (and a problem, and `problems.unreadable`) when it cannot be read."""
    place = Place(str(path))
    problems.read(place.source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it is not UTF-8 text ({error.reason})" if isinstance(error, UnicodeDecodeError) else error.strerror
        problems.add(place, f"cannot be read: {reason}", unreadable=True)
        return None
    root = _parse(text, _Converter(place, problems))
    if root is None or isinstance(root.value, dict):
        return root and Node(value=root.value, place=place)
    if root.value is None:
        return Node(value={}, place=place)
    what = "a configuration is a mapping of sections (`run:`, `model:`, ...), not a list or a single value"
    problems.add(place, what, unreadable=True)
    return None


def read_yaml_value(text: str, place: Place, problems: Problems) -> Node | None:
    """The value of an override; every node stands at `place`. None (and a problem) when it is not YAML."""
    return _parse(text, _Converter(place, problems, has_lines=False))


def read_scalar(text: str) -> Scalar:
    """What YAML makes of `text` as a plain scalar: '3' -> 3, '1e-6' -> 1e-06, 'yes' -> 'yes', '' -> None.

    Raises:
        ValueError: it cannot be used.
    """
    stripped = text.strip()
    tag = _Loader("").resolve(yaml.ScalarNode, stripped, (True, False))  # type: ignore[no-untyped-call]
    return _construct(tag, text if tag == _PREFIX + "str" else stripped)


def usable_text(text: str) -> str:
    """`text` itself.

    Raises:
        ValueError: it holds what cannot be written to a file or handed to a process.
    """
    unusable = _UNUSABLE.search(text)
    if unusable is not None:
        raise ValueError(f"holds {unusable[0]!a}, which no file name and no text can; leave it out")
    return text


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own name; emptied of the YAML 1.1 rules


for _tag, _pattern, _first in YAML_1_2_RULES:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)


def _parse(text: str, converter: _Converter) -> Node | None:
    place, problems = converter.place, converter.problems
    try:
        composed = yaml.compose(text, Loader=_Loader)
        return Node(value=None, place=place) if composed is None else converter.convert(composed, (), None)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark and converter.has_lines else None
        context = f" {error.context}" if error.context else ""
        problems.add(Place(place.source, line), f"not valid YAML: {error.problem}{context}", unreadable=True)
    except yaml.reader.ReaderError as error:
        problems.add(place, f"not valid YAML: {error.reason} at character {error.position}", unreadable=True)
    except RecursionError:
        problems.add(place, "nested deeper than any configuration; is a bracket missing?", unreadable=True)
    return None


def _construct(tag: str, text: str) -> Scalar:
    """The value of a scalar with this tag. Raises: ValueError: it has none."""
    if tag == _PREFIX + "str":
        return usable_text(text)
    pattern = next((pattern for known, pattern, _ in YAML_1_2_RULES if known == tag), None)
    if pattern is None:
        raise ValueError(f"the tag '{_shown(tag)}' is not supported")
    if not pattern.match(text):
        raise ValueError(f"'{shorten(text)}' does not fit its tag '{_shown(tag)}'")
    if tag == _PREFIX + "null":
        return None
    if tag == _PREFIX + "bool":
        return text.lower() == "true"
    if tag == _PREFIX + "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    number = int(text, 0 if text.startswith(("0o", "0x")) else 10) if len(text) <= _MOST_DIGITS else 1 << 63
    if not -(1 << 63) <= number < 1 << 63:
        what = f"{shorten(text)} is beyond 64 bits"
        raise ValueError(f"{what}; write a smaller number, or put it in quotes if it is text")
    return number


class _Converter:
    """PyYAML's nodes -> ours. Without `has_lines` every node stands at `place`."""

    def __init__(self, place: Place, problems: Problems, *, has_lines: bool = True) -> None:
        self.place, self.problems, self.has_lines = place, problems, has_lines
        self._num_values = 0  # aliases unfolded: a few lines of them can stand for billions
        self._open: list[yaml.Node] = []  # containers around the current node: an alias to one of them is a circle

    def convert(self, node: yaml.Node, path: Path, place: Place | None) -> Node:
        place = place or self._place_of(node)
        self._num_values += 1
        if self._num_values > _MOST_VALUES:
            problem = f"aliases unfold to more than {_MOST_VALUES} values; share settings by `extends`"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        if isinstance(node, yaml.ScalarNode):
            try:
                return Node(value=_construct(node.tag, node.value), place=place, quoted=node.style is not None)
            except ValueError as error:
                return self.problems.broken(place, path, str(error))
        if node in self._open:
            return self.problems.broken(place, path, "refers to itself")
        self._open.append(node)
        if isinstance(node, yaml.SequenceNode) and node.tag == _PREFIX + "seq":
            entries = [self.convert(entry, (*path, str(i)), None) for i, entry in enumerate(node.value)]
            result = Node(value=entries, place=place)
        elif isinstance(node, yaml.MappingNode) and node.tag == _PREFIX + "map":
            result = Node(value=self._mapping(node, path), place=place)
        else:
            result = self.problems.broken(place, path, f"the tag '{_shown(node.tag)}' is not supported")
        self._open.pop()
        return result

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            place, key = self._place_of(key_node), key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.broken(place, path or ("a key",), "keys are single words, not lists or mappings")
                continue
            if _UNUSABLE.search(key):
                self.problems.add(place, f"the key {key!a} holds what no text can; leave it out")
                continue
            dotted = ".".join((*path, key))
            if key == "<<" and key_node.style is None:
                self.problems.add(place, f"'{dotted}': merge keys (<<) are not supported; share settings by `extends`")
                continue
            value = self.convert(value_node, (*path, key), place)
            if key in entries:
                self.problems.add(place, f"'{dotted}' is given twice (first at {entries[key].place})")
                continue
            entries[key] = value
        return entries

    def _place_of(self, node: yaml.Node) -> Place:
        return Place(self.place.source, node.start_mark.line + 1) if self.has_lines else self.place


def _shown(tag: str) -> str:
    return tag.replace(_PREFIX, "!!")
