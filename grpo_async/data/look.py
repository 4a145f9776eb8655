"""A look at all rows before a run starts: what would train something other than was meant, though nothing fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.data.rows import ENVIRONMENT_COLUMN, Row, Rows
from grpo_async.errors import Problems

_GOLDS = ("answer", "solution")
_IMAGES = ("images", "image")
_NOT_THE_POLICYS = {
    "tools": "it is offered the `tools` of the configuration, the same for every row",
    "chat_template_kwargs": "the template gets `model.chat_template_kwargs`, the same for every row",
    "messages": "it gets `prompt`",
    "system": "it gets `prompt`; a system message belongs into it, or into `system_prompt` of the data",
    ENVIRONMENT_COLUMN: "there are no `environments` in the configuration for it to choose from",
}
"""Columns that other trainers, or this one, give a meaning, and why they have none here."""


def look_at_rows(key: str, rows: Rows, config: ExperimentConfig, problems: Problems) -> list[str]:
    """Notes on the rows of the source `key`, each with how many rows, the first of them, and what to do; what no run can use is
    added to `problems`.

    A rollout function or an agent reads rows in its own way, so there nothing is said of them. Environments add to prompts and
    read columns.
    """
    if config.has_own_rollouts:
        return []
    num_text = sum(isinstance(row["prompt"], str) for row in rows)
    kind = "messages" if num_text * 2 >= len(rows) else "plain text"
    checks: list[tuple[Callable[[Row], bool], str]] = [
        (
            lambda row: _last(row).get("role") == "assistant" and not _last(row).get("tool_calls"),
            "prompts end in an assistant's message, which the policy continues: {}. If that message is the answer, as in data for "
            "SFT, take it out of the prompt with a source of type generator (docs/howto/data.md has one)",
        ),
        (
            lambda row: any(_is_messages(row.get(name)) for name in _GOLDS),
            "rows have messages as their answer: {}. Rewards compare text; look it up with columns: {{chosen.0.content: answer}}",
        ),
        (
            _is_json_of_messages,
            "prompts are the JSON text of messages: {}. The model gets this text as it stands; for messages use a file of type "
            "jsonl or parquet, or a generator that reads it with json.loads",
        ),
        (
            lambda row: num_text % len(rows) > 0 and isinstance(row["prompt"], str) == (kind == "plain text"),
            f"prompts are {kind}, unlike the others: {{}}. Messages go through the chat template, and plain text alone does not; "
            "give all prompts one form",
        ),
    ]
    if not config.environments:
        checks += [
            (
                lambda row: _last(row).get("role", "user") not in ("user", "assistant", "tool"),
                "prompts end in neither a user's nor a tool's message: {}. Nothing asks for an answer there; add a user's message",
            ),
            (
                lambda row: not isinstance(row["prompt"], str) and not any(m["content"].strip() for m in row["prompt"]),
                "prompts have no text: {}. Fill them in or remove the rows",
            ),
        ]
        for name, why in _NOT_THE_POLICYS.items():
            text = f"rows have the column `{name}`: {{}}. Rewards get it, the policy does not: {why}"
            checks.append((_has(name), text))
        for name in _IMAGES:
            text = (
                f"rows have the column `{name}`: {{}}. The policy would not see the images, because only text is trained; leave "
                f"these rows out, or the column with remove_columns: [{name}] if the text is enough"
            )
            problems.extend(_found(key, rows, _has(name), text))
    text = "prompts end in tool calls without results: {}. Add the results, or leave the last message out"
    problems.extend(_found(key, rows, lambda row: bool(_last(row).get("tool_calls")), text))
    return [note for is_so, text in checks for note in _found(key, rows, is_so, text)]


def _has(column: str) -> Callable[[Row], bool]:
    return lambda row: row.get(column) not in (None, "", [], {})


def _found(key: str, rows: Rows, is_so: Callable[[Row], bool], text: str) -> list[str]:
    """No or one sentence: "data.train: 2 of 9 prompts end in ...: the first is train.jsonl:3. ..."."""
    indexes = [index for index, row in enumerate(rows) if is_so(row)]
    first = f"the first is {rows.locations[indexes[0]]}" if indexes else ""
    return [f"{key}: {len(indexes)} of {len(rows)} {text.format(first)}"] if indexes else []


def _last(row: Row) -> dict[str, Any]:
    """The last message of a prompt; {} of plain text."""
    return {} if isinstance(row["prompt"], str) else row["prompt"][-1]


def _is_json_of_messages(row: Row) -> bool:
    prompt = row["prompt"]
    if not (isinstance(prompt, str) and prompt.lstrip().startswith("[") and '"role"' in prompt):
        return False
    try:
        return _is_messages(json.loads(prompt))
    except (ValueError, RecursionError):
        return False


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) and "role" in each for each in value)
