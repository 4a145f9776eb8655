"""A look at all rows before a run starts: what would train something other than was meant, though nothing fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.config.sections import DistillationSection
from grpo_async.data.rows import ENVIRONMENT_COLUMN, Row, Rows
from grpo_async.errors import Problems
from grpo_async.utils.text import backticked

_GOLDS = ("answer", "solution")
_IGNORED = {
    "tools": "the configuration has no `tools`",
    "messages": "it gets `prompt`",
    "system": "it gets `prompt`, where a system message belongs, or into `system_prompt` of the data",
    ENVIRONMENT_COLUMN: "the configuration has no `environments`",
}
"""Columns that mean something elsewhere, and why they do not reach the policy here."""
_OPEN = (
    "prompts end in an assistant's message, which the policy continues. If it is the answer, as in data for SFT, take it out with "
    "a source of type generator (docs/howto/data.md has one)"
)
_TEXTS = "prompts are the JSON text of messages, which the model gets as it is; use jsonl, parquet, or a generator with json.loads"
_MIXED = (
    "prompts are {}, unlike the others. Messages go through the chat template, text alone does not; give all one form"
)
_UNASKED = "prompts end in neither a user's nor a tool's message, so nothing asks for an answer; add a user's message"
_COLUMN = "rows have the column `{}`, which rewards get and the policy does not: {}"
_IMAGE = (
    "rows have the column `{0}`. The policy would not see the images, because only text is trained; leave these rows out, or the "
    "column with remove_columns: [{0}] if the text is enough"
)


def look_at_rows(key: str, rows: Rows, config: ExperimentConfig, problems: Problems) -> list[str]:
    """Notes on the rows of the source `key`, each with how many rows, the first of them, and what to do; what no run can use is
    added to `problems`. Environments add to prompts and read columns; a rollout function or an agent reads rows in its own way."""
    if config.distillation is not None and key in config.data.sources:
        _check_teachers(config.distillation, rows, problems)
    if config.has_own_rollouts:
        return []

    def found(is_so: Callable[[Row], bool], text: str) -> list[str]:
        indexes = [index for index, row in enumerate(rows) if is_so(row)]
        return (
            [f"{key}: {len(indexes)} of {len(rows)} {text} (the first: {rows.locations[indexes[0]]})"]
            if indexes
            else []
        )

    num_text = sum(isinstance(row["prompt"], str) for row in rows)
    is_odd = str if num_text * 2 < len(rows) else list
    notes = found(lambda row: _last(row).get("role") == "assistant" and not _last(row).get("tool_calls"), _OPEN)
    notes += found(
        lambda row: any(map(_is_messages, map(row.get, _GOLDS))),
        "rows have messages as their answer; rewards compare text",
    )
    notes += found(_is_json_of_messages, _TEXTS)
    if 0 < num_text < len(rows):
        notes += found(
            lambda row: isinstance(row["prompt"], is_odd), _MIXED.format("text" if is_odd is str else "messages")
        )
    if not config.environments:
        notes += found(lambda row: _last(row).get("role", "user") not in ("user", "assistant", "tool"), _UNASKED)
        notes += found(lambda row: not _text(row), "prompts have no text; fill them in or remove the rows")
        for name, why in _IGNORED.items():
            if name != "tools" or not config.tools:
                notes += found(_has(name), _COLUMN.format(name, why))
        for name in ("images", "image"):
            problems.extend(found(_has(name), _IMAGE.format(name)))
    calls = "prompts end in tool calls without results; add the results, or leave the last message out"
    problems.extend(found(lambda row: bool(_last(row).get("tool_calls")), calls))
    return notes


def _check_teachers(section: DistillationSection, rows: Rows, problems: Problems) -> None:
    """Add a problem for the first row that names no teacher, or lacks the prompt that its teacher sees."""
    for row, location in zip(rows, rows.locations, strict=True):
        if section.teacher_column is not None and row.get(section.teacher_column) not in section.teachers:
            problems.append(
                f"{location}: `{section.teacher_column}` (distillation.teacher_column) is "
                f"{row.get(section.teacher_column)!r} here, and the teachers are {backticked(section.teachers)}"
            )
            return
        for name in section.teachers_of(row):
            column = section.teachers[name].prompt_column
            if column is not None and not row.get(column):
                problems.append(f"{location}: there is no `{column}` here (distillation.teachers.{name}.prompt_column)")
                return


def _has(column: str) -> Callable[[Row], bool]:
    return lambda row: row.get(column) not in (None, "", [], {})


def _last(row: Row) -> dict[str, Any]:
    """The last message of a prompt; {} of plain text."""
    return {} if isinstance(row["prompt"], str) else row["prompt"][-1]


def _text(row: Row) -> str:
    prompt = row["prompt"]
    return (prompt if isinstance(prompt, str) else "".join(message["content"] for message in prompt)).strip()


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) and "role" in each for each in value)


def _is_json_of_messages(row: Row) -> bool:
    prompt = row["prompt"]
    try:
        return isinstance(prompt, str) and prompt.lstrip()[:1] == "[" and _is_messages(json.loads(prompt))
    except (ValueError, RecursionError):
        return False
