"""A configuration as it was written: a tree of values, each with the file and line (or the `--set`) that it came from.

PyYAML parses; the meaning of scalars is that of YAML 1.2, because PyYAML's is YAML 1.1: it reads `1e-6` as text, `on` as true and
`010` as 8. Texts are filled in from the environment (`${NAME}`). Two equal keys are a problem that names both lines.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from grpo_async.errors import ConfigError
from grpo_async.utils.files import shipped
from grpo_async.utils.text import did_you_mean

KeyPath: TypeAlias = tuple[str, ...]
"""Keys and list indices from the root, all as text: ("rewards", "0", "weight")."""
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


class Location(NamedTuple):
    """Where something was written: `configs/x.yaml:3`, or `--set a.b=c` (then without a line)."""

    source: str
    line: int | None = None

    def __str__(self) -> str:
        return self.source if self.line is None else f"{self.source}:{self.line}"


Problem: TypeAlias = tuple[Location, str]


@dataclass(slots=True)
class Node:
    """One value of the tree, at the line of its key: a dict or list of nodes, or a scalar. `fault`: why it cannot be used."""

    value: Any
    location: Location
    fault: str = ""

    def plain(self) -> Any:
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        return [node.plain() for node in self.value] if isinstance(self.value, list) else self.value

    @property
    def entries(self) -> dict[str, Node]:
        """The nodes below by key, or by index as text."""
        if isinstance(self.value, list):
            return {str(number): node for number, node in enumerate(self.value)}
        return self.value if isinstance(self.value, dict) else {}

    def along(self, path: KeyPath) -> list[Node]:
        """This node and those that `path` leads through, as far as they exist: the last is where a missing one would be added."""
        nodes: list[Node] = [self]
        for key in path:
            if (below := nodes[-1].entries.get(key)) is None:
                break
            nodes.append(below)
        return nodes

    def has(self, path: KeyPath) -> bool:
        return len(self.along(path)) == len(path) + 1

    def put(self, path: KeyPath, node: Node) -> None:
        """Set the value at `path`; sections above it that are missing, or null, are made. ValueError: a list has no such entry."""
        key, *rest = path
        below = self.entries.get(key)
        if isinstance(self.value, list) and below is None:
            raise ValueError(f"the list has no entry '{key}', only {len(self.value)}, counted from 0")
        if rest:
            if below is None or not isinstance(below.value, dict | list):
                below = Node({}, node.location)
            below.put(tuple(rest), node)
            node = below
        self.value[int(key) if isinstance(self.value, list) else key] = node

    def faults(self, path: KeyPath = ()) -> Iterator[Problem]:
        if self.fault:
            yield self.location, f"{'.'.join(path)}: {self.fault}" if path else self.fault
        for key, below in self.entries.items():
            yield from below.faults((*path, key))


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


def no_such_file(path: Path, named_in: Path | None = None) -> str:
    if path.parent.name == "configs" and (here := shipped(f"configs/{path.name}")).is_file():
        return f"there is no file {path}; the one that comes with grpo-async is {here}"
    others = [file.name for file in path.parent.glob("*.y*ml") if file != named_in]
    return f"there is no file {path}{did_you_mean(path.name, others)}"


def read_yaml(text: str, location: Location, problems: list[Problem], *, has_lines: bool = True) -> Node:
    """What a text holds (ConfigError: it is not YAML). Without `has_lines` everything stands at `location` (an override)."""
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        return Node(None, location) if root is None else _Reader(loader, location, problems, has_lines).convert(root)
    except yaml.MarkedYAMLError as error:
        fault = f"{error.problem} {error.context or ''}".strip()
        if has_lines and error.problem_mark:
            location = Location(location.source, error.problem_mark.line + 1)
    except yaml.reader.ReaderError as error:
        fault = f"{error.reason} at character {error.position}"
    except RecursionError:
        fault = "nested deeper than any configuration; is a bracket missing, or does an alias refer to itself?"
    raise ConfigError(f"{location}: not valid YAML: {fault}")


class _Loader(yaml.SafeLoader):
    """PyYAML's, with the scalars of YAML 1.2."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - PyYAML's own name

    def scalar(self, text: str) -> Any:
        """What a plain scalar means: '3' -> 3, '1e-6' -> 1e-06, 'yes' -> 'yes', '' -> None."""
        tag = self.resolve(yaml.ScalarNode, text, (True, False))  # type: ignore[no-untyped-call]
        return self.construct_object(yaml.ScalarNode(tag, text))


for _tag, _pattern, _first in YAML_1_2_RULES:
    _Loader.add_implicit_resolver(_tag, _pattern, _first)
_Loader.add_constructor(
    _PREFIX + "int", lambda _, node: int(node.value, 0 if node.value.startswith(("0o", "0x")) else 10)
)


@dataclass(slots=True)
class _Reader:
    """PyYAML's nodes -> ours."""

    loader: _Loader
    root: Location
    problems: list[Problem]
    has_lines: bool

    def convert(self, node: yaml.Node, location: Location | None = None, path: KeyPath = ()) -> Node:
        location = location or self._location(node)
        if isinstance(node, yaml.MappingNode):
            return Node(self._entries(node, path), location)
        if isinstance(node, yaml.SequenceNode):
            return Node([self.convert(each, path=(*path, str(i))) for i, each in enumerate(node.value)], location)
        assert isinstance(node, yaml.ScalarNode)
        try:
            is_text = "${" in node.value
            return Node(self._filled_in(node) if is_text else self.loader.construct_object(node), location)
        except ValueError as error:
            return Node(None, location, str(error))

    def _entries(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key_node, value_node in node.value:
            location = self._location(key_node)
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else "?"
            if key in entries:
                twice = f"'{'.'.join((*path, key))}' is given twice (first at {entries[key].location})"
                self.problems.append((location, twice))
            else:
                entries[key] = self.convert(value_node, location, (*path, key))
        return entries

    def _location(self, node: yaml.Node) -> Location:
        return Location(self.root.source, node.start_mark.line + 1) if self.has_lines else self.root

    def _filled_in(self, node: yaml.ScalarNode) -> Any:
        """The scalar with every `${NAME}` replaced, and `${NAME:-default}` (when unset or empty); `$${` is a literal `${`.

        A plain (unquoted) scalar that is nothing but one reference is read as YAML after that: with LR=1e-6 in the environment
        `lr: ${LR}` is a number, while `name: "${RUN}"` stays text whatever RUN holds. What a variable holds is not filled in again.
        """
        filled, whole = _VARIABLE.sub(_variable, node.value), _VARIABLE.fullmatch(node.value)
        return self.loader.scalar(filled) if node.style is None and whole and whole["end"] else filled


def _variable(reference: re.Match[str]) -> str:
    if reference["body"] is None:
        return "${"
    name, has_default, default = reference["body"].partition(":-")
    if not reference["end"] or not re.fullmatch(r"[A-Za-z_]\w*", name) or "${" in default:
        raise ValueError(
            f"'{reference[0]}' is not written ${{NAME}} or ${{NAME:-default}}; write $${{ for a literal ${{"
        )
    if name not in os.environ and not has_default:
        raise ValueError(f"the environment variable '{name}' is not set; set it or write ${{{name}:-default}}")
    return os.environ.get(name) or default
