"""A configuration as it was written: a tree of values, each with the file and line (or the `--set`) that it came from.

PyYAML parses; the meaning of scalars is that of YAML 1.2, because PyYAML's is YAML 1.1: it reads `1e-6` as text, `on` as true and
`010` as 8. Texts are filled in from the environment (`${NAME}`). Two equal keys are a problem that names both lines. Tags and
merge keys (`<<`) are refused: `extends` is the one way to share settings.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from grpo_async.config.names import RENAMED
from grpo_async.errors import ConfigError
from grpo_async.utils.files import shipped
from grpo_async.utils.text import clipped, did_you_mean

logger = logging.getLogger(__name__)
KeyPath: TypeAlias = tuple[str, ...]
"""Keys and list indices from the root, all as text: ("rewards", "0", "weight")."""
_MAX_VALUES = 20_000  # of a configuration, aliases unfolded: a few lines of them can stand for billions
_MAX_DIGITS = 19  # of a number of 64 bits
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
_VARIABLE = re.compile(r"\$\$\{|\$\{(?P<body>[^}]*)(?P<end>\}?)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Location(NamedTuple):
    """Where something was written: `configs/x.yaml:3`, or `--set a.b=c` (then without a line)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


Problem: TypeAlias = tuple[Location, str]


@dataclass(slots=True)
class Node:
    """One value of the tree, at the line of its key.

    Attributes:
        value: a dict or list of nodes, or a scalar.
        fault: why the value cannot be used; then `value` is None. Replacing the node (`extends`, `--set`) forgets it.
    """

    value: Any
    location: Location
    fault: str = ""

    def plain(self) -> Any:
        """The value without locations."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    def below(self, key: str) -> Node | None:
        if isinstance(self.value, dict):
            return self.value.get(key)
        if isinstance(self.value, list) and key.isascii() and key.isdecimal() and len(key) < _MAX_DIGITS:
            return self.value[int(key)] if int(key) < len(self.value) else None
        return None

    def along(self, path: KeyPath) -> list[Node]:
        """This node and those that `path` leads through, as far as they exist: the last is where a missing one would be added."""
        nodes: list[Node] = [self]
        for key in path:
            if (below := nodes[-1].below(key)) is None:
                break
            nodes.append(below)
        return nodes

    def has(self, path: KeyPath) -> bool:
        return len(self.along(path)) == len(path) + 1

    def put(self, path: KeyPath, node: Node) -> None:
        """Set the value at `path`; sections above it that are missing, or null, are made. ValueError: a list has no such entry."""
        key, *rest = path
        below = self.below(key)
        if isinstance(self.value, list) and below is None:
            raise ValueError(f"the list has no entry '{key}', only {len(self.value)}, counted from 0")
        if rest:
            if below is None or not isinstance(below.value, dict | list):
                below = Node({}, node.location)
            below.put(tuple(rest), node)
            node = below
        self.value[int(key) if isinstance(self.value, list) else key] = node

    def faults(self, path: KeyPath = ()) -> Iterator[Problem]:
        """Problems of the values that cannot be used."""
        if self.fault:
            yield self.location, f"{'.'.join(path)}: {self.fault}" if path else self.fault
        entries = self.value.items() if isinstance(self.value, dict) else ()
        for key, below in enumerate(self.value) if isinstance(self.value, list) else entries:
            yield from below.faults((*path, str(key)))


def read_yaml_file(path: Path, problems: list[Problem]) -> Node:
    """The mapping that a file holds (else ConfigError); keys that cannot be used are added to `problems`."""
    location = Location(str(path))
    try:
        root = read_yaml(path.read_text(encoding="utf-8"), location, problems)
    except FileNotFoundError as error:
        raise ConfigError(no_such_file(path)) from error
    except (OSError, UnicodeDecodeError) as error:
        reason = f"it is not UTF-8 text ({error.reason})" if isinstance(error, UnicodeDecodeError) else error.strerror
        raise ConfigError(f"{location}: cannot be read: {reason}") from error
    if not isinstance(root.value, dict | None) or root.fault:
        raise ConfigError(
            f"{location}: a configuration is a mapping of sections (`run:`, `model:`, ...), not a list or a single value"
        )
    return Node(root.value or {}, location)


def no_such_file(path: Path) -> str:
    """That there is none, and which one may be meant."""
    if path.parent.name == "configs" and (here := shipped(f"configs/{path.name}")).is_file():
        return f"there is no file {path}; the one that comes with grpo-async is {here}"
    return f"there is no file {path}{did_you_mean(path.name, [file.name for file in path.parent.glob('*.y*ml')])}"


def read_yaml(
    text: str, location: Location, problems: list[Problem], *, path: KeyPath = (), has_lines: bool = True
) -> Node:
    """What a text holds (ConfigError: it is not YAML). `path` is where in the configuration the value will stand; without
    `has_lines` everything stands at `location` (an override)."""
    try:
        composed = yaml.compose(text, Loader=_Loader)
        if composed is None:
            return Node(None, location)
        return _Reader(location, problems, has_lines).convert(composed, path, location)
    except yaml.MarkedYAMLError as error:
        fault = f"{error.problem} {error.context or ''}".strip()
        if has_lines and error.problem_mark:
            location = Location(location.source, error.problem_mark.line + 1)
    except yaml.reader.ReaderError as error:
        fault = f"{error.reason} at character {error.position}"
    except RecursionError:
        fault = "nested deeper than any configuration; is a bracket missing, or does an alias refer to itself?"
    raise ConfigError(f"{location}: not valid YAML: {fault}")


def current_name(path: KeyPath, location: Location) -> KeyPath:
    """The path; that of its new name, with a warning, where it is an old one."""
    if (new := RENAMED.get(".".join(path))) is None:
        return path
    logger.warning("%s: %s is now called %s", location, ".".join(path), new)
    return tuple(new.split("."))


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own name; every scalar is text until `_read_scalar`


@dataclass(slots=True)
class _Reader:
    """PyYAML's nodes -> ours."""

    root: Location
    problems: list[Problem]
    has_lines: bool
    num_values: int = 0

    def convert(self, node: yaml.Node, path: KeyPath, location: Location) -> Node:
        self.num_values += 1
        if self.num_values > _MAX_VALUES:
            raise ConfigError(f"{self.root}: its aliases unfold to more than {_MAX_VALUES} values; use fewer of them")
        if node.tag.removeprefix(_PREFIX) not in ("str", "seq", "map"):
            return Node(None, location, f"the tag '{clipped(node.tag)}' is not supported")
        if isinstance(node, yaml.MappingNode):
            return Node(self._entries(node, path), location)
        if isinstance(node, yaml.SequenceNode):
            entries = enumerate(node.value)
            return Node([self.convert(each, (*path, str(i)), self._location(each)) for i, each in entries], location)
        try:
            return Node(
                _filled_in(node.value, is_plain=isinstance(node, yaml.ScalarNode) and node.style is None), location
            )
        except ValueError as error:
            return Node(None, location, str(error))

    def _entries(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            location, key = self._location(key_node), key_node.value
            if not isinstance(key_node, yaml.ScalarNode):
                key, problem = "?", "is a list or a mapping; keys are single words"
            elif _UNUSABLE.search(key):
                problem = "contains a NUL byte or a lone surrogate; remove it"
            elif key == "<<" and key_node.style is None:
                problem = "is a merge key, which is not supported; share settings by `extends`"
            elif (key := current_name((*path, key), location)[-1]) in entries:
                problem = f"is given twice (first at {entries[key].location})"
            else:
                entries[key] = self.convert(value_node, (*path, key), location)
                continue
            self.problems.append((location, f"{'.'.join((*path, key))!a} {problem}"))
        return entries

    def _location(self, node: yaml.Node) -> Location:
        return Location(self.root.source, node.start_mark.line + 1) if self.has_lines else self.root


def _filled_in(text: str, *, is_plain: bool) -> Any:
    """The scalar with every `${NAME}` replaced, and `${NAME:-default}` (when unset or empty); `$${` is a literal `${`.

    A plain (unquoted) scalar that is nothing but one reference is read as YAML after that: with LR=1e-6 in the environment
    `lr: ${LR}` is a number, while `name: "${RUN}"` stays text whatever RUN holds. What a variable holds is not interpolated again.
    """
    found = _VARIABLE.fullmatch(text)
    is_reference = found is not None and found["body"] is not None
    filled = _VARIABLE.sub(_variable, text)
    return _read_scalar(filled) if is_plain and (is_reference or "${" not in text) else _usable(filled)


def _variable(reference: re.Match[str]) -> str:
    """What stands for a reference. Raises: ValueError: nothing does."""
    if reference["body"] is None:
        return "${"
    name, has_default, default = reference["body"].partition(":-")
    if not reference["end"]:
        raise ValueError(f"'{reference[0]}' has no closing brace; write $${{ for a literal ${{")
    if not _NAME.fullmatch(name):
        raise ValueError(f"'{reference[0]}' does not name an environment variable; write $${{ for a literal ${{")
    if "${" in default:
        raise ValueError(f"'{reference[0]}': a default cannot contain another reference")
    if name not in os.environ and not has_default:
        raise ValueError(f"the environment variable '{name}' is not set; set it or write ${{{name}:-default}}")
    return os.environ.get(name) or default


def _read_scalar(text: str) -> Any:
    """What YAML 1.2 makes of a plain scalar: '3' -> 3, '1e-6' -> 1e-06, 'yes' -> 'yes', '' -> None."""
    word = text.strip()
    tag = next((tag for tag, pattern, _ in YAML_1_2_RULES if pattern.match(word)), "").removeprefix(_PREFIX)
    if tag == "null":
        return None
    if tag == "bool":
        return word.lower() == "true"
    if tag == "float":
        return float(word.lower().replace(".inf", "inf").replace(".nan", "nan"))
    if tag == "int":
        if len(word) > _MAX_DIGITS:
            raise ValueError(
                f"{clipped(word, 80)} is beyond 64 bits; write a smaller number, or quote it if it is text"
            )
        return int(word, 0 if word.startswith(("0o", "0x")) else 10)
    return _usable(text)


def _usable(text: str) -> str:
    if unusable := _UNUSABLE.search(text):
        raise ValueError(f"contains {unusable[0]!a}, a NUL byte or a lone surrogate; remove it")
    return text
