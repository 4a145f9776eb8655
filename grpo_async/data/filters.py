"""Rows that are too short or too long are left out, and counted by what left them out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from grpo_async.config.data_sections import Source
from grpo_async.data.rows import Row, Rows
from grpo_async.data.stream import make_prompt
from grpo_async.errors import ConfigError
from grpo_async.records import Prompt

CountTokens = Callable[[Prompt], int]


def apply_filters(rows: Rows, source: Source, count_tokens: CountTokens | None) -> Rows:
    """The rows that pass, with one note for each filter that left rows out. With `min_prompt_chars: 3` the prompts "ab", "abc"
    become "abc" and the note "min_prompt_chars: 3 left out 1 of 2 rows".

    Raises:
        ConfigError: no row passes.
        ValueError: `max_prompt_tokens` is set and there is nothing to count with.
    """
    if source.max_prompt_tokens is not None and count_tokens is None:
        raise ValueError("max_prompt_tokens is set: load_rows needs `count_tokens`")
    left_out: Counter[str] = Counter()
    kept = []
    for index, row in enumerate(rows):
        reason = _reason(row, source, count_tokens)
        if reason is None:
            kept.append(index)
        else:
            left_out[reason] += 1
    counts = [f"{reason} left out {count} of {len(rows)} rows" for reason, count in left_out.items()]
    if rows and not kept:
        raise ConfigError(f"no row passes the filters: {'; '.join(counts)}; loosen them")
    if not counts:
        return rows
    passed = rows.take(kept)
    passed.notes = [*rows.notes, *counts]
    return passed


def _reason(row: Row, source: Source, count_tokens: CountTokens | None) -> str | None:
    """The first filter that leaves the row out, as a setting with its value."""
    prompt = row["prompt"]
    num_chars = len(prompt) if isinstance(prompt, str) else sum(len(message["content"]) for message in prompt)
    if source.min_prompt_chars is not None and num_chars < source.min_prompt_chars:
        return f"min_prompt_chars: {source.min_prompt_chars}"
    if source.max_prompt_chars is not None and num_chars > source.max_prompt_chars:
        return f"max_prompt_chars: {source.max_prompt_chars}"
    if source.max_prompt_tokens is not None and count_tokens is not None:
        num_tokens = count_tokens(make_prompt(row, 0, source.system_prompt))
        if num_tokens > source.max_prompt_tokens:
            return f"max_prompt_tokens: {source.max_prompt_tokens}"
    return None
