"""When two rows are the same task: what duplicates, the held-out split and the leak check mean by "the same".

The key is the conversation without its system messages, letter case and white space aside, and the values of the task columns.
Worked example: "What is  2+2?" and [{system: Be brief.}, {user: what is 2+2?}] have one key. A prompt without any text says
nothing about its task (an environment's reset does), so there every column counts.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Collection
from typing import Any

from grpo_async.config.data_sections import EnvironmentSource, Source
from grpo_async.data.rows import Row, Rows

_ALWAYS = frozenset({"environment"})  # chooses the environment: another one is another task


def task_columns(source: Source) -> set[str]:
    """Columns of the source that belong to a row's task, beside the prompt."""
    own = {"seed"} if isinstance(source, EnvironmentSource) else set()
    return {*source.task_columns, *own, *_ALWAYS}


def task_key(row: Row, columns: Collection[str]) -> str:
    """The same text for two rows if and only if they are the same task."""
    prompt = row["prompt"]
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    said: list[list[Any]] = [
        [message["role"], _normalised(message["content"]), message.get("tool_calls", [])]
        for message in messages
        if message["role"] != "system"
    ]
    if not any(content for _, content, _ in said):
        columns = row.keys() - {"prompt"}
    values = {name: row[name] for name in sorted(columns) if row.get(name) is not None}
    return json.dumps([said, values], sort_keys=True, default=repr, ensure_ascii=False)


def describe_duplicates(rows: Rows, keys: list[str]) -> list[str]:
    """No or one note: how many rows repeat an earlier one."""
    first: dict[str, int] = {}
    repeats = [(index, earlier) for index, key in enumerate(keys) if (earlier := first.setdefault(key, index)) != index]
    if not repeats:
        return []
    index, earlier = repeats[0]
    return [
        f"{len(repeats)} of {len(rows)} rows repeat the prompt of an earlier row (the first: {rows.places[index]} repeats "
        f"{rows.places[earlier]}); they are kept"
    ]


def _normalised(text: str) -> str:
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())
