"""Every benchmark: it is listed, and its examples parse."""

from __future__ import annotations

import argparse
import ast
import importlib
import re
import shlex
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks import gpu
from benchmarks.__main__ import FOLDER, names
from grpo_async.cli.app import app
from grpo_async.config.loader import load_config

ROOT = Path(__file__).parents[2]


class _ParsedError(Exception):
    """The arguments were read; nothing is to be run."""


def examples(name: str) -> list[list[str]]:
    """The arguments of each command in the docstring, with its optional parts: "[--runs 3] [--json FILE]" -> --runs 3 --json FILE.
    Of alternatives "a|b" the first. Remarks stand behind " #" or two spaces."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text(encoding="utf-8"))) or ""
    text = re.sub(r"\n\s+\[", " [", text)  # a command that goes on in the next line
    found = []
    for line in text.splitlines():
        if line.strip().startswith(f"python -m benchmarks {name}"):
            plain = re.sub(r"\s(#| ).*|[\[\]]", "", line.strip())
            words = shlex.split(plain)[4:]
            found.append(["1" if word == "N" else word.partition("|")[0] for word in words])
    return found


@pytest.fixture
def parse(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, list[str]], None]:
    """parse(benchmark, arguments): they are read, and nothing is run."""
    whole = argparse.ArgumentParser.parse_args

    def parse_only(parser: argparse.ArgumentParser, *arguments: Any) -> None:
        whole(parser, *arguments)
        raise _ParsedError

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)

    def parse(name: str, arguments: list[str]) -> None:
        with pytest.raises(_ParsedError):
            importlib.import_module(f"benchmarks.{name}").main(arguments)

    return parse


@pytest.mark.parametrize("name", sorted(names()))
def test_the_commands_of_the_docstring_parse(name: str, parse: Callable[[str, list[str]], None]) -> None:
    commands = examples(name)
    assert commands, f"benchmarks/{name}.py shows no command"
    for command in commands:
        parse(name, command)


@pytest.mark.parametrize("part", gpu.parts("cuda"))
def test_every_command_of_the_proof_on_a_gpu_is_read(part: int, parse: Callable[[str, list[str]], None]) -> None:
    """What can be known of it without one: arguments parse, configs load with what is set, tests are there."""
    for command in (*gpu.parts("cuda")[part], *gpu.parts("cpu")[part]):
        module, *arguments = command.format(runs="runs").split()[1:]
        if module == "benchmarks":
            parse(arguments[0], arguments[1:])
        elif module == "pytest":
            paths = [each for each in arguments if each.startswith("tests/")]
            assert paths and all((ROOT / path).exists() for path in paths)  # noqa: PT018
            for option, keyword in pairwise(arguments):
                assert option != "-k" or re.search(rf"def test_\w*{keyword}", (ROOT / paths[0]).read_text("utf-8"))
        elif arguments[0] in ("train", "eval"):
            overrides = [value for option, value in pairwise(arguments) if option == "--set"]
            load_config(ROOT / arguments[1], overrides)
        else:
            help_of = CliRunner().invoke(app, [*arguments, "--help"])
            assert help_of.exit_code == 0, help_of.output
