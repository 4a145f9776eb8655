"""Reads a configuration: files with `extends`, then overrides, then validation; and writes one.

    extends: base.yaml            # or a list; later ones win; paths are relative to the file that says it

Mappings are merged key by key, everything else is replaced. The location of a value is that of the file it came from. A section
with a `type` starts afresh when the type changes: keys of another type would only be unknown ones.

Everything that is wrong is reported in one ConfigError, one line each, with the location to change. All other paths in a
configuration are relative to the working directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import ValidationError

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.field_types import FieldType, suggest_key
from grpo_async.config.problems import explained
from grpo_async.config.yaml_document import (
    YAML_1_2_RULES,
    KeyPath,
    Location,
    Node,
    Problem,
    read_yaml,
    read_yaml_file,
)
from grpo_async.errors import ConfigError
from grpo_async.utils.files import shipped
from grpo_async.utils.safe_text import escape_surrogates
from grpo_async.utils.text import clipped, did_you_mean


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The configuration in `path` with `overrides` ("optimizer.lr=1e-6") on top.

    Raises:
        ConfigError: with every problem of the files, the overrides, the environment and the values.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise ConfigError(_no_such_file(path))
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    loading = _Loading()
    root = loading.read(path, ())
    for override in overrides:
        loading.apply(override, root)
    loading.problems += root.faults()
    config = None
    try:
        config = ExperimentConfig.model_validate(root.plain())
    except ValidationError as error:
        loading.problems += explained(error, root)
    if loading.problems or config is None:
        raise ConfigError(loading.report())
    return config


def read_values(file: Path, problems: list[str]) -> dict[str, Any]:
    """What a file holds that need not be valid otherwise, such as a config.yaml of another version. What of it cannot be read is a
    line in `problems`."""
    found: list[Problem] = []
    try:
        root = read_yaml_file(file, found)
    except ConfigError as error:
        problems.append(str(error))
        return {}
    problems += [f"{location}: {message}" for location, message in [*found, *root.faults()]]
    values: dict[str, Any] = root.plain()
    return values


def set_options(overrides: Sequence[str]) -> list[str]:
    """Overrides as a command line has them: ["a.b=1"] -> ["--set", "a.b=1"]."""
    return [word for override in overrides for word in ("--set", override)]


def dump_config(config: ExperimentConfig) -> str:
    """The whole configuration, defaults included, as YAML that `load_config` reads back to an equal object."""
    return dump_values(config.model_dump())


def dump_values(values: Mapping[str, Any]) -> str:
    """A configuration, or a part of one, as YAML that `load_config` reads back."""
    return yaml.dump(
        _escaped(dict(values)),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=120,
    )


def _no_such_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a directory; name a YAML file"
    if path.parent.name == "configs" and (here := shipped(f"configs/{path.name}")).is_file():
        return f"there is no file {path}; the one that comes with grpo-async is {here}"
    names = sorted(file.name for file in path.parent.glob("*.y*ml")) if path.parent.is_dir() else []
    return f"there is no file {path}{did_you_mean(path.name, names)}"


@dataclass(slots=True)
class _Loading:
    """Reading one configuration: what is wrong so far, and the files that were read, which several may extend."""

    problems: list[Problem] = field(default_factory=list)
    known: dict[Path, Node] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)

    def report(self) -> str:
        """One problem a line, by source in the order of reading, and by line."""
        ordered = sorted(self.problems, key=lambda found: (self.sources.index(found[0].source), found[0].line or 0))
        return "\n".join(dict.fromkeys(f"{location}: {message}" for location, message in ordered))

    def read(self, path: Path, inside: Sequence[Path]) -> Node:
        """A file merged over everything it extends.

        Args:
            inside: the files that led here, outermost first; meeting one of them again is a cycle.

        Raises:
            ConfigError: one of the files cannot be read.
        """
        if path in self.known:
            return self.known[path]
        self.sources.append(str(path))
        own = read_yaml_file(path, self.problems)
        bases = own.value.pop("extends", None)
        merged = Node({}, own.location)
        for each in bases.value if bases and isinstance(bases.value, list) else [bases] if bases else []:
            base = _base(each, path, (*inside, path))
            merged = _merged(merged, self.read(base, (*inside, path)), _ROOT)
        self.known[path] = _merged(merged, own, _ROOT)
        return self.known[path]

    def apply(self, override: str, root: Node) -> None:
        """One `--set`: a value read as YAML, on top of every file. List entries go by index: `rewards.0.weight=2`."""
        location = Location(f"--set {escape_surrogates(clipped(override, 100))}")
        self.sources.append(location.source)
        dotted, has_value, text = override.partition("=")
        path = tuple(part.strip() for part in dotted.split("."))
        if not has_value or not all(path):
            self.problems.append((location, "an override is written section.key=value"))
        elif fault := _fault_of(path, root):
            self.problems.append((location, fault))
        else:
            root.put(path, read_yaml(text, location, self.problems, path=path, has_lines=False))


_ROOT = FieldType.of(ExperimentConfig)


def _base(name: Node, path: Path, chain: Sequence[Path]) -> Path:
    """The file that `extends` names in the last file of `chain`, `path`.

    Raises:
        ConfigError: there is no such file, or it is one of `chain`.
    """
    base = Path(os.path.normpath(path.parent / os.path.expanduser(str(name.value))))
    fault = name.fault
    try:
        if not fault and not isinstance(name.value, str):
            fault = "give the name of a file, or a list of names"
        elif not fault and base.resolve() in [file.resolve() for file in chain]:
            fault = f"it closes a cycle: {' -> '.join(str(file) for file in [*chain, base])}"
        elif not fault and not base.is_file():
            fault = f"there is no file {base} (paths are relative to {path})"
    except OSError as error:  # a name that is too long, a folder that may not be entered
        fault = f"{base} cannot be read: {error.strerror}"
    if fault:
        raise ConfigError(f"{name.location}: extends: {fault}")
    return base


def _merged(below: Node, above: Node, field_type: FieldType | None) -> Node:
    """`above` on top of `below`: {a: {b: 1, c: 2}} under {a: {c: 3}} -> {a: {b: 1, c: 3}}."""
    old, new = below.value, above.value
    if not (isinstance(old, dict) and isinstance(new, dict)) or _is_of_another_type(old, new, field_type):
        return above
    entries = dict(old)
    for key, node in new.items():
        inner = field_type.below(key) if field_type else None
        entries[key] = _merged(old[key], node, inner) if key in old else node
    return Node(entries, above.location)


def _is_of_another_type(old: Mapping[str, Node], new: Mapping[str, Node], field_type: FieldType | None) -> bool:
    if field_type is None or not field_type.tags or "type" not in new:
        return False
    return bool(new["type"].value != (old["type"].value if "type" in old else field_type.default_tag))


def _fault_of(path: KeyPath, root: Node) -> str:
    """Why nothing can be set at a path; empty: it can."""
    for length, node in enumerate(root.along(path)):
        if isinstance(node.value, list) and length < len(path) and node.below(path[length]) is None:
            known = ", ".join(map(str, range(len(node.value)))) or "none at all"
            return f"'{'.'.join(path[:length])}' has no entry '{path[length]}', only {clipped(known, 80)}"
    return "" if _ROOT.find(path) else f"unknown key '{'.'.join(path)}'{suggest_key(_ROOT, path)}"


def _escaped(value: Any) -> Any:
    """In YAML's types; `${` in texts is escaped, so that it is not taken for a variable when it is read back."""
    if isinstance(value, dict):
        return {key: _escaped(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(below) for below in value]
    return str(value).replace("${", "$${") if isinstance(value, str | PurePath) else value


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or 1.2 would read as something other than text."""


for _tag, _pattern, _first in YAML_1_2_RULES:
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
