"""Reads a configuration: files with `extends`, then overrides, then the environment, then validation; and writes one.

    extends: base.yaml            # or a list; later ones win; paths are relative to the file that says it

Mappings are merged key by key, everything else is replaced. The location of a value is that of the file it came from. A section
with a `type` starts afresh when the type changes: keys of another type would only be unknown ones.

Everything that is wrong is reported in one ConfigError, one line each, with the location to change. All other paths in a
configuration are relative to the working directory.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import ValidationError

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.field_types import RENAMED_KEYS, FieldType, suggest_key
from grpo_async.config.problems import report
from grpo_async.config.yaml_document import (
    YAML_1_2_RULES,
    Document,
    KeyPath,
    Location,
    Problems,
    Unquoted,
    check_text,
    read_scalar,
    read_yaml,
    read_yaml_file,
)
from grpo_async.errors import ConfigError
from grpo_async.utils.package_files import shipped
from grpo_async.utils.safe_text import escape_surrogates
from grpo_async.utils.text import clipped, did_you_mean

logger = logging.getLogger(__name__)

_REFERENCE = re.compile(r"\$\$\{|\$\{(?P<body>[^}]*)(?P<end>\}?)")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_THE_JOB = (("launch", "slurm", "setup"), ("launch", "slurm", "options"))


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
    field_type, problems = FieldType.of(ExperimentConfig), Problems()
    document = _read_with_bases(path, [], {}, field_type, problems)
    if problems.unreadable:
        raise ConfigError(problems.text())
    for override in overrides:
        _apply_override(document, override, field_type, problems)
    document.values = _interpolated(document.values, (), document, problems)
    config = None
    try:
        config = ExperimentConfig.model_validate(document.values)
    except ValidationError as error:
        report(error, document, field_type, problems)
    if problems or config is None:
        raise ConfigError(problems.text())
    return config


def read_values(file: Path, problems: Problems) -> dict[str, Any]:
    """What a file holds that need not be valid otherwise, such as a config.yaml of another version; empty where it cannot be
    read."""
    document = read_yaml_file(file, problems)
    values: dict[str, Any] = _interpolated(document.values, (), document, problems)
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
        _writable(dict(values)),
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


def _take_old_names(document: Document, problems: Problems) -> None:
    """Give each setting that stands under its old name the one that it has now, and warn; drop what is gone."""
    for old, new in RENAMED_KEYS.items():
        if old not in document.locations:
            continue
        if new is not None and new[: len(old)] == old and isinstance(document.value(old), dict):
            continue  # the section that the setting has become
        location = document.locations.pop(old)
        value = document.value(old[:-1]).pop(old[-1])
        if new is None:
            if value is not None:
                logger.warning("%s: %s is gone and has no effect; remove it", location, ".".join(old))
            continue
        if new in document.locations:
            problems.add(location, f"{'.'.join(old)}: is the old name of {'.'.join(new)}, which is set, too; remove it")
        else:
            logger.warning(
                "%s: %s is called %s now; the old name is taken by this version only",
                location,
                *map(".".join, (old, new)),
            )
            document.put(new, Document(value, {(): location}, {()} if old in document.broken else set()))


# ---- files ----


def _read_with_bases(
    path: Path, inside: Sequence[Path], known: dict[Path, Document], field_type: FieldType, problems: Problems
) -> Document:
    """A file merged over everything it extends. One that cannot be read is a problem.

    Args:
        inside: the files that led here, outermost first; meeting one of them again is a cycle.
        known: files that were read already, which several may extend; is added to.
    """
    own = read_yaml_file(path, problems)
    _take_old_names(own, problems)
    chain, merged = [*inside, path], Document({}, {})
    for location, name in _names_of_bases(own, problems):
        base = Path(os.path.normpath(path.parent / os.path.expanduser(str(name))))
        if fault := _fault_of_base(name, base, chain):
            problems.add(location, f"extends: {fault}", unreadable=True)
            continue
        if base not in known:
            known[base] = _read_with_bases(base, chain, known, field_type, problems)
        merged = _merge(merged, known[base], field_type)
    return _merge(merged, own, field_type)


def _names_of_bases(own: Document, problems: Problems) -> list[tuple[Location, Any]]:
    """What `extends` names, which is taken out of the document."""
    if "extends" not in own.values:
        return []
    written = _interpolated(own.values.pop("extends"), ("extends",), own, problems)
    paths = [("extends", str(index)) for index in range(len(written))] if isinstance(written, list) else [("extends",)]
    problems.unreadable |= not own.broken.isdisjoint(paths)
    names = written if isinstance(written, list) else [written]
    return [(own.location(path), name) for path, name in zip(paths, names, strict=True) if path not in own.broken]


def _fault_of_base(name: Any, base: Path, chain: Sequence[Path]) -> str:
    """Why `base` cannot be extended by the last of `chain`; empty: it can."""
    if not isinstance(name, str):
        return "give the name of a file, or a list of names"
    try:
        if base.resolve() in [file.resolve() for file in chain]:
            return f"it closes a cycle: {' -> '.join(str(file) for file in [*chain, base])}"
        return "" if base.is_file() else f"there is no file {base} (paths are relative to {chain[-1]})"
    except OSError as error:  # a name that is too long, a folder that may not be entered
        return f"{base} cannot be read: {error.strerror}"


def _merge(below: Document, above: Document, field_type: FieldType) -> Document:
    """`above` on top of `below`: {a: {b: 1, c: 2}} under {a: {c: 3}} -> {a: {b: 1, c: 3}}."""
    merged = Document(None, below.locations, below.broken)

    def merge(old: Any, new: Any, path: KeyPath, field_type: FieldType | None) -> Any:
        if not (isinstance(old, dict) and isinstance(new, dict)) or _is_of_another_type(old, new, field_type):
            merged.replace_locations(path, {})
            return new
        entries = dict(old)
        for key, value in new.items():
            where, inner = (*path, key), field_type.below(key) if field_type else None
            entries[key] = merge(old[key], value, where, inner) if key in old else value
        return entries

    merged.values = merge(below.values, above.values, (), field_type)
    merged.locations, merged.broken = merged.locations | above.locations, merged.broken | above.broken
    return merged


def _is_of_another_type(old: Mapping[str, Any], new: Mapping[str, Any], field_type: FieldType | None) -> bool:
    if field_type is None or not field_type.tags or "type" not in new:
        return False
    return bool(new["type"] != old.get("type", field_type.default_tag))


# ---- overrides ----


def _apply_override(document: Document, override: str, field_type: FieldType, problems: Problems) -> None:
    """One `--set`: a value read as YAML, on top of every file. List entries go by index: `rewards.0.weight=2`. A path that does not
    exist and a value that cannot be read are problems."""
    location = Location(f"--set {escape_surrogates(clipped(override, 100))}")
    dotted, has_value, text = override.partition("=")
    path = tuple(part.strip() for part in dotted.split("."))
    new = RENAMED_KEYS.get(path)
    if new is not None and new[: len(path)] != path:  # else a section of that name may be meant
        logger.warning("%s: %s is called %s now", location, dotted, ".".join(new))
        path = new
    if not has_value or not all(path):
        problems.add(location, "an override is written section.key=value")
        return
    above = (path[:length] for length in range(1, len(path)))
    lists = [one for one in above if one in document.locations and isinstance(document.value(one), list)]
    if field_type.find(path) is None and not lists:
        problems.add(location, f"unknown key '{'.'.join(path)}'{suggest_key(field_type, path)}")
    elif missing := [one for one in lists if path[: len(one) + 1] not in document.locations]:
        entries, key = document.value(missing[0]), path[len(missing[0])]
        known = ", ".join(map(str, range(len(entries)))) or "none at all"
        problems.add(location, f"'{'.'.join(missing[0])}' has no entry '{key}', only {clipped(known, 80)}")
    else:
        document.put(path, read_yaml(text, location, problems, has_lines=False))
        _take_old_names(document, problems)


# ---- the environment ----


def _interpolated(value: Any, path: KeyPath, document: Document, problems: Problems) -> Any:
    """The value with every `${NAME}` in its texts replaced, and `${NAME:-default}` (when unset or empty); `$${` is a literal `${`.

    An unquoted value that is nothing but one reference is then read as a YAML scalar: with LR=1e-6 in the environment
    `lr: ${LR}` is a number, while `name: "${RUN}"` stays text whatever RUN holds. What a variable holds is not interpolated again.
    A value with a problem is None, and `document.broken` has its path.

    The lines that `launch slurm` writes into its script (`launch.slurm.setup`, `.options`) are left to the job: `${NAME}` stays as
    it is, so that no secret of this environment gets into the script; only `$${` is read as `${` there too.
    """
    if isinstance(value, dict):
        return {key: _interpolated(below, (*path, key), document, problems) for key, below in value.items()}
    if isinstance(value, list):
        return [_interpolated(below, (*path, str(i)), document, problems) for i, below in enumerate(value)]
    if not isinstance(value, str):
        return value
    if path[:3] in _OF_THE_JOB:
        return value.replace("$${", "${")
    whole = _REFERENCE.fullmatch(value)
    is_one_reference = whole is not None and whole["body"] is not None and isinstance(value, Unquoted)
    try:
        text = _REFERENCE.sub(_filled_in, value)
        return read_scalar(text) if is_one_reference else check_text(text)
    except ValueError as error:
        problems.add(document.location(path), f"{'.'.join(path)}: {error}")
        document.broken.add(path)
        return None


def _filled_in(reference: re.Match[str]) -> str:
    """What stands for a reference. Raises: ValueError: nothing does."""
    if reference["body"] is None:
        return "${"
    name, has_default, default = reference["body"].partition(":-")
    if not reference["end"]:
        raise ValueError(f"'{reference[0]}' has no closing brace; write $${{ for a literal ${{")
    if not _NAME.fullmatch(name):
        raise ValueError(f"'{reference[0]}' does not name an environment variable; write $${{ for a literal ${{")
    if name not in os.environ and not has_default:
        raise ValueError(f"the environment variable '{name}' is not set; set it or write ${{{name}:-default}}")
    return os.environ.get(name) or default


# ---- writing ----


def _writable(value: Any) -> Any:
    """Plain YAML types; `${` in texts is escaped, so that it is not taken for an interpolation when it is read back."""
    if isinstance(value, dict):
        return {key: _writable(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(below) for below in value]
    if isinstance(value, Enum):
        return _writable(value.value)
    if isinstance(value, str | PurePath):
        return str(value).replace("${", "$${")
    return value


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or 1.2 would read as something other than text."""


for _tag, _pattern, _first in YAML_1_2_RULES:
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
