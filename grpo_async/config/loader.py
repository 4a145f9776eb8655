"""Reads a configuration: files with `extends`, then overrides, then validation; and writes one.

    extends: base.yaml            # or a list; later ones win; paths are relative to the file that says it

Mappings are merged key by key, everything else is replaced. The location of a value is that of the file it came from. A section
with a `type` starts afresh when the type changes: keys of another type would only be unknown ones.

Everything that is wrong is reported in one ConfigError, one line each, with the location to change. pydantic's errors name its own
internals (union tags, "Value error,", model classes); here each becomes
`configs/x.yaml:9: inference.vllm.gpu_memory_utilization: input should be less than or equal to 1 (got 1.4)`.
All other paths in a configuration are relative to the working directory.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import ValidationError

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.keys import keys_at, suggest_key
from grpo_async.config.names import REMOVED
from grpo_async.config.public import is_public
from grpo_async.config.yaml_file import (
    YAML_1_2_RULES,
    KeyPath,
    Location,
    Node,
    Problem,
    no_such_file,
    read_yaml,
    read_yaml_file,
)
from grpo_async.errors import ConfigError
from grpo_async.utils.safe_text import escape_surrogates
from grpo_async.utils.text import clipped, did_you_mean

_DOTTED = re.compile(r"\b[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+\b")
_SECRET = re.compile(r"(?:^|[._])(?:token|key|secret|password)$")


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The configuration in `path` with `overrides` ("optimizer.lr=1e-6") on top.

    Raises:
        ConfigError: with every problem of the files, the overrides, the environment and the values.
    """
    loading = _Loading()
    root = loading.read(Path(path))
    for override in overrides:
        loading.apply(override, root)
    loading.problems += root.faults()
    config = None
    try:
        config = ExperimentConfig.model_validate(root.plain())
    except ValidationError as error:
        loading.problems += _explained(error, root)
    if loading.problems or config is None:
        raise ConfigError(loading.report())
    return config


def read_values(file: Path, problems: list[str]) -> dict[str, Any]:
    """What a file holds that need not be valid otherwise, such as a config.yaml of another version. Each value that cannot be read
    adds a line to `problems`."""
    found: list[Problem] = []
    try:
        root = read_yaml_file(file, found)
    except ConfigError as error:
        problems.append(str(error))
        return {}
    problems += [f"{location}: {message}" for location, message in [*found, *root.faults()]]
    values: dict[str, Any] = root.plain()
    return values


def read_override(source: str, text: str) -> Any:
    """The value that a text of the command line is, as YAML. ConfigError: it is not valid."""
    problems: list[Problem] = []
    node = read_yaml(text, Location(source), problems, has_lines=False)
    if problems := [*problems, *node.faults()]:
        raise ConfigError("\n".join(f"{location}: {message}" for location, message in problems))
    return node.plain()


def set_options(overrides: Sequence[str]) -> list[str]:
    """Overrides as a command line has them: ["a.b=1"] -> ["--set", "a.b=1"]."""
    return [word for override in overrides for word in ("--set", override)]


def dump_config(config: ExperimentConfig) -> str:
    """The whole configuration, defaults included, as YAML that `load_config` reads back to an equal object."""
    return dump_values(config.model_dump())


def dump_values(values: Mapping[str, Any]) -> str:
    return yaml.dump(
        _escaped(dict(values)),
        Dumper=_Dumper,
        sort_keys=False,
        default_flow_style=False,
        allow_unicode=True,
        width=120,
    )


@dataclass(slots=True)
class _Loading:
    """What is wrong so far, and what was read."""

    problems: list[Problem] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)

    def report(self) -> str:
        """One problem a line, by source in the order of reading, and by line."""
        ordered = sorted(self.problems, key=lambda found: (self.sources.index(found[0].source), found[0].line or 0))
        return "\n".join(dict.fromkeys(f"{location}: {message}" for location, message in ordered))

    def read(self, path: Path, inside: Sequence[Path] = ()) -> Node:
        """A file merged over everything it extends. `inside`: the files that led here; meeting one of them again is a cycle."""
        self.sources.append(str(path))
        own, chain = read_yaml_file(path, self.problems), (*inside, path)
        bases = own.value.pop("extends", None)
        merged = Node({}, own.location)
        for each in bases.value if bases and isinstance(bases.value, list) else [bases] if bases else []:
            merged = _merged(merged, self.read(_base(each, chain), chain))
        return _merged(merged, own)

    def apply(self, override: str, root: Node) -> None:
        """One `--set`: a value read as YAML, on top of every file. List entries go by index: `rewards.0.weight=2`."""
        dotted, has_value, text = override.partition("=")
        shown = f"{dotted}=..." if has_value and (_may_be_secret(dotted) or "@" in text) else override
        location = Location(f"--set {escape_surrogates(clipped(shown, 100))}")
        self.sources.append(location.source)
        path = tuple(part.strip() for part in dotted.split("."))
        if not has_value or not all(path):
            self.problems.append((location, "an override is written section.key=value"))
            return
        node = read_yaml(text, location, self.problems, has_lines=False)
        try:
            root.put(path, node)
        except ValueError as error:
            self.problems.append((location, str(error)))


def _base(name: Node, chain: Sequence[Path]) -> Path:
    """The file that `extends` names in the last file of `chain`."""
    fault, base = name.fault, Path(os.path.normpath(chain[-1].parent / os.path.expanduser(str(name.value))))
    if not fault and not isinstance(name.value, str):
        fault = "give the name of a file, or a list of names"
    elif not fault and not os.path.isfile(base):
        fault = f"{no_such_file(base, chain[-1])} (paths are relative to {chain[-1]})"
    elif not fault and base.resolve() in [file.resolve() for file in chain]:
        fault = f"it closes a cycle: {' -> '.join(str(file) for file in [*chain, base])}"
    if fault:
        raise ConfigError(f"{name.location}: extends: {fault}")
    return base


def _merged(below: Node, above: Node, path: KeyPath = ()) -> Node:
    """`above` on top of `below`: {a: {b: 1, c: 2}} under {a: {c: 3}} -> {a: {b: 1, c: 3}}."""
    old, new = below.value, above.value
    if not (isinstance(old, dict) and isinstance(new, dict)) or _is_of_another_type(old, new, path):
        return above
    entries = dict(old)
    for key, node in new.items():
        entries[key] = _merged(old[key], node, (*path, key)) if key in old else node
    return Node(entries, above.location)


def _is_of_another_type(old: Mapping[str, Node], new: Mapping[str, Node], path: KeyPath) -> bool:
    if "type" not in new or not any(key.tells_types for key in keys_at((*path, "type"))):
        return False
    return bool(new["type"].value != (old["type"].value if "type" in old else _default_type(path)))


def _default_type(path: KeyPath) -> Any:
    return next((json.loads(key.default) for key in keys_at((*path, "type")) if key.default is not None), None)


# ---- what validation found, in the words of the person who wrote the file ----


def _explained(error: ValidationError, root: Node) -> Iterator[Problem]:
    """Every error at the location that has to change. Values that cannot be used anyway are left out."""
    for fault in error.errors(include_url=False):
        path = _path_of(fault["loc"], root)
        if not any(node.fault for node in root.along(path)):
            yield from _explain(dict(fault), path, root)


def _path_of(loc: Sequence[int | str], root: Node) -> KeyPath:
    """What is written of pydantic's location, which has the tags of unions too:
    ('data', 'train', 'jsonl', 'path') -> ('data', 'train', 'path')."""
    path: KeyPath = ()
    for segment in map(str, loc):
        path = (*path, segment) if root.has((*path, segment)) else path
    return path


def _explain(fault: dict[str, Any], path: KeyPath, root: Node) -> Iterator[Problem]:
    kind, context, dotted = fault["type"], fault.get("ctx", {}), ".".join(path)
    location = root.along(path)[-1].location
    match kind:
        case "extra_forbidden":
            yield from _unknown_keys(path, root)
        case "missing":
            yield location, f"{'.'.join([*path, str(fault['loc'][-1])])}: this key is required"
        case "union_tag_not_found":
            kinds = ", ".join(key.type.replace(" | ", ", ") for key in keys_at((*path, "type")))
            yield location, f"{dotted}.type: this key is required, one of {kinds}"
        case "union_tag_invalid":
            tag, known = str(context["tag"]), context["expected_tags"]
            gone = REMOVED.get(f"{path[0]}.{tag}")
            hint = f"; {tag} {gone}" if gone else did_you_mean(tag, _quoted_in(known))
            place = root.along((*path, "type"))[-1].location
            yield place, f"{dotted}.type: input should be one of {known} (got {tag!r}){hint}"
        case "value_error":
            yield from (_rule(line, path, root) for line in str(context["error"]).splitlines() if line)
        case _:
            message, hint = fault["msg"][:1].lower() + fault["msg"][1:], ""
            if kind in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
                message = "input should be a mapping of keys"
            if kind == "string_type" and isinstance(fault["input"], int | float):
                hint = "; put it in quotes"
            if kind == "literal_error" and isinstance(fault["input"], str):
                hint = did_you_mean(fault["input"], _quoted_in(context["expected"]))
            got = "" if _may_be_secret(dotted) else f" (got {_shown(fault['input'])})"
            yield location, f"{dotted or 'the file'}: {message}{got}{hint}"


def _quoted_in(text: str) -> list[str]:
    return re.findall(r"'([^']*)'", text)


def _unknown_keys(path: KeyPath, root: Node) -> Iterator[Problem]:
    """A key that nothing here has: of a whole section, each key in it."""
    node, dotted = root.along(path)[-1], ".".join(path)
    if owners := [tag for key in keys_at(path) for tag in key.of_types]:
        section = root.along(path[:-1])[-1].plain()
        own = section.get("type", _default_type(path[:-1]))
        known = " and ".join(map(repr, owners))
        yield node.location, f"unknown key '{dotted}' of type '{own}'; it belongs to type {known}"
    elif isinstance(node.value, dict) and node.value:
        for key in node.value:
            yield from _unknown_keys((*path, key), root)
    else:
        yield node.location, f"unknown key '{dotted}'{suggest_key(path)}"


def _rule(line: str, path: KeyPath, root: Node) -> Problem:
    """A rule's own message. One that spans sections points at the first of the settings it names that is written somewhere."""
    if path:
        return root.along(path)[-1].location, f"{'.'.join(path)}: {line}"
    named = [tuple(found.split(".")) for found in _DOTTED.findall(line)]
    written = next((each for each in named if root.has(each)), ())
    return root.along(written)[-1].location, line


def _may_be_secret(dotted: str) -> bool:
    """Whether a value at this path must not be printed: it may be a password, or stand in the user's own arguments."""
    return not is_public(dotted) or _SECRET.search(dotted) is not None


def _shown(value: object) -> str:
    """A value in YAML's words, short."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, dict | list | tuple):
        return "a mapping" if isinstance(value, dict) else "a list" if value else "an empty list"
    return clipped(repr(value), 80)


# ---- writing ----


def _escaped(value: Any) -> Any:
    """The value in YAML's types; `${` in texts is escaped, so that it is not taken for a variable when it is read back."""
    if isinstance(value, dict):
        return {key: _escaped(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(below) for below in value]
    return str(value).replace("${", "$${") if isinstance(value, str | PurePath) else value


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or 1.2 would read as something other than text."""


for _tag, _pattern, _first in YAML_1_2_RULES:
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
