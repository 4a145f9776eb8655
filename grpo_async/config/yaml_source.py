"""Reads YAML into nodes with places, by the YAML 1.2 rules.

PyYAML does the parsing; the meaning of scalars is ours, because PyYAML's is YAML 1.1: it reads `1e-6` as text, `on` as
true and `010` as 8. It also takes the last of two equal keys without a word; here that is a problem naming both lines.
Tags of one's own and merge keys (`<<`) are refused: `extends` is the one way to share settings. So is what no configuration
holds but would stall or break what comes after: megabytes, a hundred levels, aliases that unfold without end, numbers beyond
64 bits, NUL and halves of characters.
"""

from __future__ import annotations

import re
from pathlib import Path as FilePath

import yaml

from grpo_async.config.tree import Node, Path, Place, Problems, Scalar

_MOST_CHARACTERS = 256 << 10  # PyYAML reads about 100 kB a second
_MOST_LEVELS = 64
_MOST_VALUES = 20_000  # aliases unfolded
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


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own name; emptied of the YAML 1.1 rules
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """PyYAML's own, which calls itself for each level, with an end."""
        if self._depth > _MOST_LEVELS:
            raise yaml.MarkedYAMLError(
                problem=f"nested deeper than {_MOST_LEVELS} levels",
                problem_mark=self.peek_event().start_mark,  # type: ignore[no-untyped-call]
            )
        self._depth += 1
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


for _tag, _pattern, _first in YAML_1_2_RULES:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)


def read_yaml_file(path: FilePath, problems: Problems) -> Node | None:
    """The root mapping of a file; None (and a problem, and `problems.unreadable`) when it cannot be read."""
    place = Place(str(path))
    problems.read(place.source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it is not UTF-8 text ({error.reason})" if isinstance(error, UnicodeDecodeError) else error.strerror
        problems.add(place, f"cannot be read: {reason}")
        problems.unreadable = True
        return None
    root = _parse(text, place, fixed_place=False, problems=problems)
    if root is None:
        return None
    if root.value is None:
        return Node(value={}, place=place)
    if not isinstance(root.value, dict):
        problems.add(
            place, "a configuration is a mapping of sections (`run:`, `model:`, ...), not a list or a single value"
        )
        problems.unreadable = True
        return None
    return Node(value=root.value, place=place)


def read_yaml_value(text: str, place: Place, problems: Problems) -> Node | None:
    """The value of an override; every node stands at `place`. None (and a problem) when it is not YAML."""
    return _parse(text, place, fixed_place=True, problems=problems)


def read_scalar(text: str) -> Scalar:
    """What YAML makes of `text` as a plain scalar: '3' -> 3, '1e-6' -> 1e-06, 'yes' -> 'yes', '' -> None.

    Raises:
        ValueError: it cannot be used.
    """
    stripped = text.strip()
    tag = _Loader("").resolve(yaml.ScalarNode, stripped, (True, False))  # type: ignore[no-untyped-call]
    return _construct(tag, text if tag == _PREFIX + "str" else stripped)


def _construct(tag: str, text: str) -> Scalar:
    pattern = next((pattern for known, pattern, _ in YAML_1_2_RULES if known == tag), None)
    if pattern is not None and not pattern.match(text):
        raise ValueError(f"'{_short(text)}' does not fit its tag '{_shown(tag)}'")
    if tag == _PREFIX + "null":
        return None
    if tag == _PREFIX + "bool":
        return text.lower() == "true"
    if tag == _PREFIX + "int":
        number = int(text, 0 if text.startswith(("0o", "0x")) else 10) if len(text) <= _MOST_DIGITS else 1 << 63
        if not -(1 << 63) <= number < 1 << 63:
            raise ValueError(
                f"{_short(text)} is beyond 64 bits; write a smaller number, or put it in quotes if it is text"
            )
        return number
    if tag == _PREFIX + "float":
        return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))
    return usable_text(text)


def usable_text(text: str) -> str:
    """`text` itself.

    Raises:
        ValueError: it holds what cannot be written to a file or handed to a process.
    """
    unusable = _UNUSABLE.search(text)
    if unusable is not None:
        raise ValueError(f"holds {unusable[0]!a}, which no file name and no text can; leave it out")
    return text


def _parse(text: str, place: Place, *, fixed_place: bool, problems: Problems) -> Node | None:
    if len(text) > _MOST_CHARACTERS:
        problems.add(
            place,
            f"has {len(text)} characters, a configuration {_MOST_CHARACTERS} at most; keep data in a file of its own",
        )
        problems.unreadable = True
        return None
    try:
        composed = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark and not fixed_place else None
        context = f" {error.context}" if error.context else ""
        problems.add(Place(place.source, line), f"not valid YAML: {error.problem}{context}")
        problems.unreadable = True
        return None
    except yaml.reader.ReaderError as error:
        problems.add(place, f"not valid YAML: {error.reason} at character {error.position}")
        problems.unreadable = True
        return None
    if composed is None:
        return Node(value=None, place=place)
    return _Converter(place, fixed_place, problems).convert(composed, (), None)


class _Converter:
    """PyYAML's nodes -> ours."""

    def __init__(self, place: Place, fixed_place: bool, problems: Problems) -> None:
        self._place, self._fixed_place, self._problems = place, fixed_place, problems
        self._open: list[yaml.Node] = []  # containers around the current node: an alias to one of them is a circle
        self._num_values = 0
        self._gave_up = False

    def convert(self, node: yaml.Node, path: Path, place: Place | None) -> Node:
        place = place or self._place_of(node)
        if self._gave_up:
            return Node(value=None, place=place, broken=True)
        self._num_values += 1
        if self._num_values > _MOST_VALUES:
            return self._endless(
                place, f"aliases unfold to more than {_MOST_VALUES} values; share settings by `extends`"
            )
        if isinstance(node, yaml.ScalarNode):
            return self._scalar(node, path, place)
        if node in self._open:
            return self._broken(place, path, "refers to itself")
        if len(self._open) > _MOST_LEVELS:
            return self._endless(place, f"aliases nest deeper than {_MOST_LEVELS} levels; share settings by `extends`")
        self._open.append(node)
        if isinstance(node, yaml.SequenceNode) and node.tag == _PREFIX + "seq":
            entries = [self.convert(entry, (*path, str(i)), None) for i, entry in enumerate(node.value)]
            result = Node(value=entries, place=place)
        elif isinstance(node, yaml.MappingNode) and node.tag == _PREFIX + "map":
            result = Node(value=self._mapping(node, path), place=place)
        else:
            result = self._broken(place, path, f"the tag '{_shown(node.tag)}' is not supported")
        self._open.pop()
        return result

    def _mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            place = self._place_of(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._problems.add(place, f"{'.'.join(path) or 'a key'}: keys are single words, not lists or mappings")
                continue
            key = key_node.value
            if _UNUSABLE.search(key):
                self._problems.add(place, f"the key {key!a} holds what no text can; leave it out")
                continue
            dotted = ".".join((*path, key))
            if key == "<<" and key_node.style is None:
                self._problems.add(place, f"'{dotted}': merge keys (<<) are not supported; share settings by `extends`")
                continue
            value = self.convert(value_node, (*path, key), place)
            if key in entries:
                self._problems.add(place, f"'{dotted}' is given twice (first at {entries[key].place})")
                continue
            entries[key] = value
        return entries

    def _scalar(self, node: yaml.ScalarNode, path: Path, place: Place) -> Node:
        try:
            value = _construct(node.tag, node.value)
        except ValueError as error:
            return self._broken(place, path, str(error))
        if not node.tag.startswith(_PREFIX) or node.tag.removeprefix(_PREFIX) not in (
            "null",
            "bool",
            "int",
            "float",
            "str",
        ):
            return self._broken(place, path, f"the tag '{_shown(node.tag)}' is not supported")
        return Node(value=value, place=place, quoted=node.style is not None)

    def _endless(self, place: Place, message: str) -> Node:
        """Nothing more is converted, and nothing validated."""
        self._problems.add(place, message)
        self._problems.unreadable = self._gave_up = True
        return Node(value=None, place=place, broken=True)

    def _broken(self, place: Place, path: Path, message: str) -> Node:
        self._problems.add(place, f"{'.'.join(path)}: {message}" if path else message)
        return Node(value=None, place=place, broken=True)

    def _place_of(self, node: yaml.Node) -> Place:
        return self._place if self._fixed_place else Place(self._place.source, node.start_mark.line + 1)


def _shown(tag: str) -> str:
    return tag.replace(_PREFIX, "!!")


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_SHOWN else text[: _LONGEST_SHOWN - 3] + "..."
