"""Reads a configuration: files with `extends`, then overrides, then the environment, then validation.

    read_with_bases -> apply_override... -> interpolate -> validate
                 (merging)                                (problems)

Everything that is wrong is reported in one ConfigError, one line each, with the place to change. Paths in a
configuration are relative to the working directory; only `extends` is relative to its file.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import yaml
from pydantic import ValidationError

from grpo_async.config.experiment import ExperimentConfig
from grpo_async.config.merging import apply_override, escape, interpolate, read_with_bases
from grpo_async.config.problems import report, to_plain
from grpo_async.config.shape import Shape
from grpo_async.config.tree import YAML_1_2_RULES, Problems
from grpo_async.errors import ConfigError

_GONE = (("training", "row_tokens"),)
"""Section and name of settings that earlier versions had."""


def load_config(path: Path, overrides: Sequence[str] = ()) -> ExperimentConfig:
    """The configuration in `path` with `overrides` ("optimizer.lr=1e-6") on top.

    Raises:
        ConfigError: with every problem of the files, the overrides, the environment and the values.
    """
    try:
        if not path.is_file():
            raise ConfigError(_no_such_file(path))
    except OSError as error:  # a name that is too long, a folder that may not be entered
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from error
    shape, problems = Shape.of(ExperimentConfig), Problems()
    root = read_with_bases(path, shape, os.environ, problems)
    if root is None:
        raise ConfigError(problems.text())
    for override in overrides:
        root = apply_override(root, override, shape, problems)
    root = interpolate(root, os.environ, problems)
    config = None
    try:
        config = ExperimentConfig.model_validate(_without_gone(to_plain(root, shape)))
    except ValidationError as error:
        report(error, root, shape, problems)
    if problems or config is None:
        raise ConfigError(problems.text())
    return config


def _without_gone(values: Any) -> Any:
    """Without settings that there are no more, where they are null: so they stand in the config.yaml of every run of that time, and
    say nothing."""
    for section, name in _GONE:
        settings = values.get(section) if isinstance(values, dict) else None
        if isinstance(settings, dict) and name in settings and settings[name] is None:
            del settings[name]
    return values


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
    names = [file.name for file in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    near = get_close_matches(path.name, sorted(names), n=1)
    return f"there is no file {path}" + (f"; did you mean '{path.parent / near[0]}'?" if near else "")


def _writable(value: Any) -> Any:
    """Plain YAML types; text is escaped, so that it is not taken for an interpolation when it is read back."""
    if isinstance(value, dict):
        return {key: _writable(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_writable(below) for below in value]
    if isinstance(value, Enum):
        return _writable(value.value)
    if isinstance(value, str | PurePath):
        return escape(str(value))
    return value


class _Dumper(yaml.SafeDumper):
    """Quotes what either YAML 1.1 or 1.2 would read as something other than text."""


for _tag, _pattern, _first in YAML_1_2_RULES:
    _Dumper.add_implicit_resolver(_tag, _pattern, _first)
