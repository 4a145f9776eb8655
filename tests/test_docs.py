"""What the README and docs/ tell people to type: every command and option is there, every query can be parsed."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer.main

from grpo_async.cli.app import app
from grpo_async.store.query import parse_query
from scripts.reference import FOLDER, pages

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
_COMMAND = re.compile(
    r"(?:grpo-async |(?=inspect-rollouts))([a-z][a-z-]+)((?: +(?:'[^'\n]*'|\"[^\"\n]*\"|[^\s`|#()>]+))*)"
)


def _commands() -> list[tuple[str, str, list[str]]]:
    found = []
    for page in PAGES:
        for match in _COMMAND.finditer(page.read_text(encoding="utf-8")):
            found.append((page.name, match[1], shlex.split(match[2])))
    return found


def test_the_reference_is_fresh() -> None:
    written = {file.name: file.read_text(encoding="utf-8") for file in FOLDER.glob("*.md")}
    assert written == pages(), "run: python -m scripts.reference"


def test_the_pages_have_commands() -> None:
    assert len(_commands()) > 30


@pytest.mark.parametrize(("page", "name", "arguments"), _commands(), ids=lambda value: str(value)[:60])
def test_a_command_of_the_pages_is_there_with_its_options(page: str, name: str, arguments: list[str]) -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    assert name in commands, f"{page}: grpo-async {name}"
    command = commands[name]
    if hasattr(command, "commands"):
        command = command.commands[arguments[0]]
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)} | {
        "--help"
    }
    for argument in arguments:
        if argument.startswith("--"):
            assert argument.partition("=")[0] in known, f"{page}: grpo-async {name} {argument}"


@pytest.mark.parametrize(
    ("page", "query"),
    [
        (page, arguments[1])
        for page, name, arguments in _commands()
        if name == "inspect-rollouts"
        and len(arguments) > 1
        and not arguments[1].startswith("-")
        and "QUERY" not in arguments[1]
    ],
)
def test_a_query_of_the_pages_can_be_parsed(page: str, query: str) -> None:
    parse_query(query)


def test_the_files_that_the_architecture_names_are_there() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\b[a-z_]+/[a-z_/]+\.py\b", page))
    assert len(named) > 15
    missing = [name for name in named if not any((base / name).exists() for base in (ROOT, ROOT / "grpo_async"))]
    assert not missing
    for function, file in re.findall(r"`(\w+(?:\.\w+)?)`[^`]{0,30} in\s+`([\w/]+\.py)`", page):
        assert f" {function.rpartition('.')[2]}(" in (ROOT / "grpo_async" / file).read_text(encoding="utf-8"), function
