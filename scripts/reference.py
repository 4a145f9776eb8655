"""Writes docs/reference/ from the code: every key of the configuration, every metric and command, every column of the store.

python -m scripts.reference
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer.main

from benchmarks._models import SHAPES, trainer_bytes
from grpo_async.cli.app import app
from grpo_async.config.keys import all_keys
from grpo_async.config.names import OTHER_NAMES
from grpo_async.store.schema import COLUMNS
from grpo_async.tracking.catalog import CATALOG

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
_MADE = "<!-- made by `python -m scripts.reference` -->"


def pages() -> dict[str, str]:
    """Text by file name."""
    return {
        "config.md": _config(),
        "metrics.md": _metrics(),
        "commands.md": _commands(),
        "columns.md": _columns(),
        "what-fits.md": _what_fits(),
    }


def _config() -> str:
    lines = [
        "# Configuration",
        "",
        "Every key, by section. `grpo-async explain KEY` describes one in a terminal, and takes the names of other trainers.",
        "The unit is in the name: `_s` seconds, `_mb` MiB, `_tokens` tokens.",
        "",
        "- **`extends`** (text or list of text): Files, relative to this one, that this file is merged over; later ones win.",
    ]
    section = None
    for key in all_keys():
        if key.path.startswith(("evaluation.data.", "evaluation.data[].", "data.train[].")):
            continue  # they are those of data.train
        if (top := key.path.partition(".")[0].removesuffix("[]")) != section:
            section = top
            lines += ["", f"## {top}", ""]
        elsewhere = f" *Elsewhere: {key.elsewhere}.*" if key.elsewhere else ""
        lines.append(f"- **`{key.path}`** ({key.summary}): {' '.join(key.meaning.split())}{elsewhere}")
    lines += ["", "## What other trainers, and earlier versions, have and this one does not", ""]
    lines += [f"- `{other.name}` ({other.trainer}) {other.why}." for other in OTHER_NAMES if other.here is None]
    return _page(lines)


def _metrics() -> str:
    lines = [
        "# Metrics",
        "",
        "Names in `metrics.jsonl` and in trackers; those of an evaluation begin with `eval/`. `{...}` stands for a name. Over",
        "several steps a metric becomes one number as the third column says.",
        "",
    ]
    rows = [
        (f"`{each.name}`", f"{each.help} ({each.unit})" if each.unit else each.help, each.reduction) for each in CATALOG
    ]
    return _page(lines + _table(("metric", "meaning", "over steps"), rows))


def _what_fits() -> str:
    lines = [
        "# What fits",
        "",
        "The longest samples, in thousands of tokens, that so many GPUs of 80 GB can train with all parameters: float32 master",
        "weights, bfloat16, `model.activation_checkpointing: full`, one sample in a micro-batch, 4 GB of a GPU left to CUDA and",
        "NCCL. Computed by the formula of the plan, not measured; `grpo-async train CONFIG --dry-run` applies it to your model.",
        "With `training.context_parallel: N` that many GPUs compute a sample together, and `training.micro_batch_tokens` is an",
        "Nth of it.",
        "",
    ]
    columns = [(optimizer, together) for optimizer in ("adamw", "adamw_8bit") for together in (1, 2, 8)]
    header = ["model", "GPUs", *(f"{optimizer}, context_parallel {together}" for optimizer, together in columns)]
    rows = []
    for name in ("4b", "8b", "32b", "70b"):
        for ranks in (1, 2, 4, 8, 16, 32, 64):
            longest = [_longest(name, ranks, *column) if column[1] <= ranks else 0 for column in columns]
            if any(longest):
                rows.append([name.upper(), str(ranks), *(str(each) if each else "-" for each in longest)])
    return _page(lines + _table(header, rows))


def _longest(name: str, ranks: int, optimizer: str, together: int) -> int:
    """In thousands of tokens."""
    few, many = (
        trainer_bytes(SHAPES[name], ranks=ranks, tokens=tokens, optimizer=optimizer) for tokens in (4096, 8192)
    )
    room = 80e9 - 4e9 - few  # above a chunk of logits bytes grow by the same for each token
    return max(0, int((4096 + room / (many - few) * 4096) * together // 1000))


def _columns() -> str:
    lines = [
        "# Columns of the rollout store",
        "",
        "The same for the Parquet blocks of [the rollout store](../rollout-store.md) and for what `grpo-async export` writes,",
        "which has one more, `superseded` (BOOLEAN). JSON columns are text in Parquet and objects in JSON lines. In JSON lines,",
        "control characters, and bidirectional ones, are escaped (`\\u009b`). NULL means: not known, or",
        "there is none. A group that has no rollout (it failed or was cancelled before one ended) has one row, in which all",
        "columns of a rollout are NULL. Queries may also use the short name that stands after a column's own.",
        "",
    ]
    names = [f"`{each.name}`" + (f", `{each.short}`" if each.short else "") for each in COLUMNS]
    rows = [(name, each.type, each.unit, each.description) for name, each in zip(names, COLUMNS, strict=True)]
    return _page(lines + _table(("column", "type", "unit", "what it is"), rows))


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
    context = command.make_context(name, [], resilient_parsing=True)
    for option in command.params:
        if option.param_type_name == "option" and not option.hidden:
            value = "" if option.is_flag else f" {option.metavar or _type(option.display_type(context))}"
            lines.append(f"- `{', '.join(option.opts)}{value}`: {option.help}")
    typed, _, more = examples.partition("\n\n")
    for language, block in (("bash", typed), ("text", more)):
        if block.strip():
            lines += ["", f"```{language}", textwrap.dedent(block).strip(), "```"]
    return [*lines, ""]


def _type(text: str) -> str:
    """ "<int range>" -> "INT"."""
    return text.strip("<>").removesuffix(" range").upper()


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [headings, ["---"] * len(headings), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return [f"| {' | '.join(line)} |" for line in lines]


def _page(lines: list[str]) -> str:
    return "\n".join([_MADE, "", *lines]).rstrip() + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for file, text in pages().items():
        (FOLDER / file).write_text(text, encoding="utf-8")
