"""A configuration as it was written: its values, and for each of them the file and line (or the `--set`) that it came from.

PyYAML parses; the meaning of scalars is that of YAML 1.2, because PyYAML's is YAML 1.1: it reads `1e-6` as text, `on` as true and
`010` as 8. It also takes the last of two equal keys silently; here that is a problem that names both lines. Custom tags and merge
keys (`<<`) are refused: `extends` is the one way to share settings.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from grpo_async.utils.text import clipped

KeyPath: TypeAlias = tuple[str, ...]
"""Keys and list indices from the root, all as text: ("rewards", "0", "weight")."""
_MAX_VALUES = 20_000  # of a configuration, aliases unfolded: a few lines of them can stand for billions
_MAX_DIGITS = 24  # enough for 64 bits in every notation; int() refuses thousands of them in words of its own
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
"""Tag, how a plain scalar with it is written, and the characters it may begin with."""


def index_of(key: str) -> int | None:
    """The index of a list entry that a key of a path means: "12" -> 12; None for anything else, such as "²" or 5,000 digits."""
    return int(key) if key.isascii() and key.isdecimal() and len(key) <= _MAX_DIGITS else None


class Location(NamedTuple):
    """Where something was written: `configs/x.yaml:3`, or `--set a.b=c` (then without a line)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


class Unquoted(str):
    """Text that was written without quotes: what a variable puts in its place may be a number."""

    __slots__ = ()


@dataclass(slots=True)
class Document:
    """`values` are dicts, lists and scalars; `locations` has the path of each: a value of a mapping stands at the line of its key.
    `broken` are the paths of values that were reported: whatever validation says about them is noise."""

    values: Any
    locations: dict[KeyPath, Location]
    broken: set[KeyPath] = field(default_factory=set)

    def value(self, path: KeyPath) -> Any:
        """The value at `path`, which is one of `locations`."""
        value = self.values
        for key in path:
            value = value[int(key)] if isinstance(value, list) else value[key]
        return value

    def location(self, path: KeyPath) -> Location:
        """Of the value at `path`, or of the deepest one above it: where a missing key would have to be added."""
        return next(self.locations[path[:n]] for n in range(len(path), -1, -1) if path[:n] in self.locations)

    def put(self, path: KeyPath, below: Document) -> None:
        """Set the value at `path`; sections above it that are missing, or null, are made. Entries of lists must be there."""
        owner = self.values
        for length, key in enumerate(path[:-1], start=1):
            if not isinstance(self.value(path[:length]) if path[:length] in self.locations else None, dict | list):
                owner[int(key) if isinstance(owner, list) else key] = {}
                self.locations[path[:length]] = below.location(())
            owner = self.value(path[:length])
        owner[int(path[-1]) if isinstance(owner, list) else path[-1]] = below.values
        self.replace_locations(path, {path + other: location for other, location in below.locations.items()})
        self.broken |= {path + other for other in below.broken}

    def replace_locations(self, path: KeyPath, locations: dict[KeyPath, Location]) -> None:
        """Forget those of the value at `path` and of everything below it, and what was broken there; then add others."""
        self.locations = {
            other: location for other, location in self.locations.items() if other[: len(path)] != path
        } | locations
        self.broken = {other for other in self.broken if other[: len(path)] != path}


class Problems:
    """Collects what is wrong, so that everything is reported at once.

    `unreadable` is set when a file could not be read at all; then validation would only complain about what it held.
    """

    def __init__(self) -> None:
        self.unreadable = False
        self._found: list[tuple[Location, str]] = []
        self._sources: list[str] = []

    def __bool__(self) -> bool:
        return bool(self._found)

    def read(self, source: str) -> None:
        """Note that `source` was read: problems are listed in the order of reading."""
        if source not in self._sources:
            self._sources.append(source)

    def add(self, location: Location, message: str, *, unreadable: bool = False) -> None:
        self.read(location.source)
        self._found.append((location, message))
        self.unreadable |= unreadable

    def text(self) -> str:
        """One problem a line, by source and line."""
        ordered = sorted(self._found, key=lambda found: (self._sources.index(found[0].source), found[0].line or 0))
        return "\n".join(dict.fromkeys(f"{location}: {message}" for location, message in ordered))


def read_yaml_file(path: Path, problems: Problems) -> Document:
    """The mapping that a file holds; an empty one (and a problem, and `problems.unreadable`) when it cannot be read."""
    location = Location(str(path))
    problems.read(location.source)
    try:
        document = read_yaml(path.read_text(encoding="utf-8"), location, problems)
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it is not UTF-8 text ({error.reason})" if isinstance(error, UnicodeDecodeError) else error.strerror
        problems.add(location, f"cannot be read: {reason}", unreadable=True)
        return Document({}, {(): location})
    if not isinstance(document.values, dict | None):
        what = "a configuration is a mapping of sections (`run:`, `model:`, ...), not a list or a single value"
        problems.add(location, what, unreadable=True)
    document.values = document.values if isinstance(document.values, dict) else {}
    return document


def read_yaml(text: str, location: Location, problems: Problems, *, has_lines: bool = True) -> Document:
    """What a text holds; null, and a problem, when it is not YAML.

    Args:
        has_lines: False: everything stands at `location` (an override).
    """
    document = Document(None, {(): location})
    try:
        composed = yaml.compose(text, Loader=_Loader)
        if composed is not None:
            document.values = _Reader(document, problems, has_lines).convert(composed, ())
        return document
    except yaml.MarkedYAMLError as error:
        fault = f"{error.problem} {error.context or ''}".strip()
        if has_lines and error.problem_mark:
            location = Location(location.source, error.problem_mark.line + 1)
    except yaml.reader.ReaderError as error:
        fault = f"{error.reason} at character {error.position}"
    except RecursionError:
        fault = "nested deeper than any configuration; is a bracket missing, or does an alias refer to itself?"
    problems.add(location, f"not valid YAML: {fault}", unreadable=True)
    return Document(None, {(): location}, {()})


def read_scalar(text: str) -> Any:
    """What YAML makes of `text` as a plain scalar: '3' -> 3, '1e-6' -> 1e-06, 'yes' -> 'yes', '' -> None.

    Raises:
        ValueError: it cannot be used.
    """
    stripped = text.strip()
    tag = _Loader("").resolve(yaml.ScalarNode, stripped, (True, False))  # type: ignore[no-untyped-call]
    return _construct(tag, text if tag == _PREFIX + "str" else stripped)


def check_text(text: str) -> str:
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


def _construct(tag: str, text: Any) -> Any:
    """The value of a scalar with this tag. Raises: ValueError: it has none."""
    pattern = next((pattern for known, pattern, _ in YAML_1_2_RULES if known == tag), None)
    if not isinstance(text, str) or (pattern is None and tag != _PREFIX + "str"):
        raise ValueError(f"the tag '{tag}' is not supported")
    if pattern is None:
        return check_text(text)
    if not pattern.match(text):
        raise ValueError(f"'{clipped(text, 80)}' does not fit its tag '{tag}'")
    match tag.removeprefix(_PREFIX):
        case "null":
            return None
        case "bool":
            return text.lower() == "true"
        case "float":
            return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    number = int(text, 0 if text.startswith(("0o", "0x")) else 10) if len(text) <= _MAX_DIGITS else 1 << 63
    if not -(1 << 63) <= number < 1 << 63:
        raise ValueError(f"{clipped(text, 80)} is beyond 64 bits; write a smaller number, or quote it if it is text")
    return number


@dataclass(slots=True)
class _Reader:
    """PyYAML's nodes -> values; locations and problems are added to `document` and `problems`."""

    document: Document
    problems: Problems
    has_lines: bool
    num_values: int = 0

    def convert(self, node: yaml.Node, path: KeyPath) -> Any:
        self.num_values += 1
        if self.num_values > _MAX_VALUES:
            problem = f"aliases unfold to more than {_MAX_VALUES} values; share settings by `extends`"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
        self.document.locations.setdefault(path, self._location_of(node))
        if isinstance(node, yaml.SequenceNode) and node.tag == _PREFIX + "seq":
            return [self.convert(entry, (*path, str(index))) for index, entry in enumerate(node.value)]
        if isinstance(node, yaml.MappingNode) and node.tag == _PREFIX + "map":
            return self._mapping(node, path)
        try:
            value = _construct(node.tag, node.value)
        except ValueError as error:
            self.document.broken.add(path)
            self.problems.add(self.document.location(path), f"{'.'.join(path)}: {error}" if path else str(error))
            return None
        is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
        return Unquoted(value) if isinstance(value, str) and is_plain else value

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Any]:
        entries: dict[str, Any] = {}
        for key_node, value_node in node.value:
            location, key = self._location_of(key_node), key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                key, problem = "?", "is a list or a mapping; keys are single words"
            elif _UNUSABLE.search(key):
                problem = "holds what no text can; leave it out"
            elif key == "<<" and key_node.style is None:
                problem = "is a merge key, which is not supported; share settings by `extends`"
            elif key in entries:
                problem = f"is given twice (first at {self.document.location((*path, key))})"
            else:
                self.document.locations[(*path, key)] = location
                entries[key] = self.convert(value_node, (*path, key))
                continue
            self.problems.add(location, f"{'.'.join((*path, key))!a} {problem}")
        return entries

    def _location_of(self, node: yaml.Node) -> Location:
        location = self.document.locations[()]
        return Location(location.source, node.start_mark.line + 1) if self.has_lines else location
