"""Writes docs/reference/ from the code: every key of the configuration, every metric, every command.

python -m scripts.reference
"""

from __future__ import annotations

import inspect
import textwrap
from pathlib import Path
from typing import Any

import typer.main

from grpo_async.cli.app import app
from grpo_async.config.other_names import OTHER_NAMES
from grpo_async.config.reference import all_keys
from grpo_async.tracking.catalog import CATALOG

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_MADE = "<!-- made by `python -m scripts.reference` -->"


def pages() -> dict[str, str]:
    """Text by file name."""
    return {"config.md": _config(), "metrics.md": _metrics(), "commands.md": _commands()}


def _config() -> str:
    lines = [
        "# Configuration",
        "",
        "Every key, by section. `grpo-async explain KEY` tells of one in a terminal, and takes the names of other trainers.",
        "A key's unit stands in its name: `_s` seconds, `_mb` MiB, `_tokens` tokens.",
    ]
    section = None
    for key in all_keys():
        if (top := key.path.partition(".")[0].removesuffix("[]")) != section:
            section = top
            lines += ["", f"## {top}", ""]
        elsewhere = f" *Elsewhere: {key.elsewhere}.*" if key.elsewhere else ""
        lines.append(f"- **`{key.path}`** ({key.summary}): {' '.join(key.meaning.split())}{elsewhere}")
    lines += ["", "## What other trainers have and this one does not", ""]
    lines += [f"- `{other.name}` ({other.trainer}) {other.why}." for other in OTHER_NAMES if other.here is None]
    return _page(lines)


def _metrics() -> str:
    lines = [
        "# Metrics",
        "",
        "Names in `metrics.jsonl` and in trackers; those of an evaluation begin with `eval/`. `{...}` stands for a name. Over",
        "several steps a metric becomes one number as the third column says.",
        "",
        "| metric | meaning | over steps | better |",
        "|---|---|---|---|",
    ]
    for entry in CATALOG:
        unit = f" ({entry.unit})" if entry.unit else ""
        lines.append(f"| `{entry.name}` | {_cell(entry.help)}{unit} | {entry.reduction} | {entry.better or ''} |")
    return _page(lines)


def _commands() -> str:
    group: Any = typer.main.get_command(app)
    lines = ["# Commands", ""]
    for name, command in group.commands.items():
        subcommands = getattr(command, "commands", None)
        if subcommands is None:
            lines += _command(name, command)
        else:
            for below, subcommand in subcommands.items():
                lines += _command(f"{name} {below}", subcommand)
    return _page(lines)


def _command(name: str, command: Any) -> list[str]:
    arguments = [each.metavar or each.name.upper() for each in command.params if each.param_type_name == "argument"]
    text = inspect.cleandoc(command.help or "").replace("\b\n", "")
    about, _, examples = text.partition("Examples:\n")
    lines = [f"## grpo-async {name}", "", f"`{' '.join(['grpo-async', name, *arguments])}`", "", about.strip(), ""]
    for option in command.params:
        if option.param_type_name == "option" and not option.hidden:
            value = "" if option.is_flag else f" {option.metavar or option.display_type}"
            lines.append(f"- `{', '.join(option.opts)}{value}`: {option.help}")
    typed, _, more = examples.partition("\n\n")
    for language, block in (("bash", typed), ("text", more)):
        if block.strip():
            lines += ["", f"```{language}", textwrap.dedent(block).strip(), "```"]
    return [*lines, ""]


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _page(lines: list[str]) -> str:
    return "\n".join([_MADE, "", *lines]).rstrip() + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, text in pages().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
