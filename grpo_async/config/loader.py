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

import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import ValidationError

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.keys import REMOVED, RENAMED, ROOT, FieldType, suggest_key
from grpo_async.config.public import is_public
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

logger = logging.getLogger(__name__)

_DOTTED = re.compile(r"\b[a-z][a-z0-9_]*(?:\.[a-z0-9_]+)+\b")
_SECRET = re.compile(r"(?:^|[._])(?:token|key|secret|password)$")
_MAX_REPORTED = 100  # looking for the nearest key takes 10 ms each


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
        """
        if path in self.known:
            return self.known[path]
        self.sources.append(str(path))
        own = read_yaml_file(path, self.problems)
        bases = own.value.pop("extends", None)
        self._rename_old_keys(own)
        merged = Node({}, own.location)
        for each in bases.value if bases and isinstance(bases.value, list) else [bases] if bases else []:
            base = _base(each, path, (*inside, path))
            merged = _merged(merged, self.read(base, (*inside, path)), ROOT)
        self.known[path] = _merged(merged, own, ROOT)
        return self.known[path]

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
        node = read_yaml(text, location, self.problems, path=path, has_lines=False)
        if path in RENAMED:
            path = _new_name(path, location)
        if fault := _fault_of(path, root):
            self.problems.append((location, fault))
        else:
            root.put(path, node)
            self._rename_old_keys(root)

    def _rename_old_keys(self, root: Node) -> None:
        """Give each setting that has its old name the new one, and warn."""
        for old, new in RENAMED.items():
            node, section = root.at(old), root.at(old[:-1])
            if node is None or section is None:
                continue
            del section.value[old[-1]]
            if root.at(new) is not None:
                problem = f"{'.'.join(old)}: is the old name of {'.'.join(new)}, which is also set; remove it"
                self.problems.append((node.location, problem))
                continue
            root.put(_new_name(old, node.location), node)


def _new_name(old: KeyPath, location: Location) -> KeyPath:
    new = RENAMED[old]
    logger.warning("%s: %s is now called %s", location, ".".join(old), ".".join(new))
    return new


def _base(name: Node, path: Path, chain: Sequence[Path]) -> Path:
    """The file that `extends` names in the last file of `chain`, `path`."""
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
    return "" if ROOT.find(path) else f"unknown key '{'.'.join(path)}'{suggest_key(path)}"


# ---- what validation found, in the words of the person who wrote the file ----


def _explained(error: ValidationError, root: Node) -> Iterator[Problem]:
    """Every error at the location that has to change. Values that cannot be used anyway are left out."""
    faults = error.errors(include_url=False)
    if len(faults) > _MAX_REPORTED:
        yield root.location, f"{len(faults)} values are wrong; here are the first {_MAX_REPORTED}"
    for fault in faults[:_MAX_REPORTED]:
        path = _path_of(fault["loc"], fault["type"])
        if not any(node.fault for node in root.along(path)):
            yield from _explain(dict(fault), path, root)


def _path_of(loc: Sequence[int | str], kind: str) -> KeyPath:
    """pydantic's location without the tags of unions: ('data', 'train', 'jsonl', 'path') -> ('data', 'train', 'path')."""
    path: list[str] = []
    current = ROOT
    for position, segment in enumerate(map(str, loc)):
        if segment in current.tags:
            current = FieldType((current.tags[segment],))
        elif (below := current.below(segment)) is not None:
            path.append(segment)
            current = below
        elif kind == "extra_forbidden" and position == len(loc) - 1:
            path.append(segment)
    return tuple(path)


def _explain(fault: dict[str, Any], path: KeyPath, root: Node) -> Iterator[Problem]:
    kind, context, dotted = fault["type"], fault.get("ctx", {}), ".".join(path)
    location, found = root.nearest(path), ROOT.find(path)
    tags = list(found.tags) if found else []
    match kind:
        case "extra_forbidden":
            yield location, _unknown_key(path, root)
        case "missing":
            yield location, f"{dotted}: this key is required"
        case "union_tag_not_found":
            yield location, f"{dotted}.type: this key is required, one of {', '.join(map(repr, tags))}"
        case "union_tag_invalid":
            tag = str(context["tag"])
            gone = REMOVED.get((path[0], tag))
            hint = f"; {tag} {gone}" if gone else did_you_mean(tag, tags)
            message = f"input should be one of {', '.join(map(repr, tags))} (got {context['tag']!r}){hint}"
            yield root.nearest((*path, "type")), f"{dotted}.type: {message}"
        case "value_error":
            yield from (_rule(line, path, root) for line in str(context["error"]).splitlines() if line)
        case _:
            message, hint = fault["msg"][:1].lower() + fault["msg"][1:], ""
            if kind in ("model_type", "model_attributes_type", "dict_type", "mapping_type"):
                message = "input should be a mapping of keys"
            if kind == "string_type" and isinstance(fault["input"], int | float):
                hint = "; put it in quotes"
            if kind == "literal_error" and isinstance(fault["input"], str):
                hint = did_you_mean(fault["input"], re.findall(r"'([^']*)'", context["expected"]))
            got = "" if _may_be_secret(dotted) else f" (got {_shown(fault['input'])})"
            yield location, f"{dotted or 'the file'}: {message}{got}{hint}"


def _unknown_key(path: KeyPath, root: Node) -> str:
    key, dotted, union, section = path[-1], ".".join(path), ROOT.find(path[:-1]), root.at(path[:-1])
    owners = [tag for tag, model in union.tags.items() if key in model.model_fields] if union else []
    if union is not None and section is not None and owners:
        own = section.plain().get("type", union.default_tag)
        return f"unknown key '{dotted}' of type '{own}'; it belongs to type {' and '.join(map(repr, owners))}"
    return f"unknown key '{dotted}'{suggest_key(path)}"


def _rule(line: str, path: KeyPath, root: Node) -> Problem:
    """A rule's own message. One that spans sections points at the first of the settings it names that is written somewhere."""
    known = [named for found in _DOTTED.findall(line) if ROOT.find(named := tuple(found.split("."))) is not None]
    written = next((named for named in known if root.at(named) is not None), path)
    opens_with_path = bool(known) and line.startswith(".".join(known[0]) + ":")
    message = line if opens_with_path or not path else f"{'.'.join(path)}: {line}"
    return root.nearest(path or written), message


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
