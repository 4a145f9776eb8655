"""Filters by length: what they leave out, and that they say so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.data_sections import JsonlSource
from grpo_async.data.sources import load_rows
from grpo_async.errors import ConfigError
from grpo_async.records import Prompt


def _source(folder: Path, lengths: list[int], **settings: Any) -> JsonlSource:
    path = folder / "rows.jsonl"
    path.write_text("".join(f'{{"prompt": "{"x" * length}"}}\n' for length in lengths), encoding="utf-8")
    return JsonlSource(path=path, **settings)


def _words(prompt: Prompt) -> int:
    return sum(len(message.content) for message in prompt.messages)


def test_each_filter_counts_what_it_left_out(tmp_path: Path) -> None:
    source = _source(tmp_path, [1, 2, 3, 4, 5, 6], min_prompt_chars=2, max_prompt_chars=5, max_prompt_tokens=3)
    rows = load_rows(source, count_tokens=_words)
    assert [len(row["prompt"]) for row in rows] == [2, 3]
    assert [place.rpartition(":")[2] for place in rows.places] == ["2", "3"]
    assert rows.notes == [
        "min_prompt_chars: 2 left out 1 of 6 rows",
        "max_prompt_tokens: 3 left out 2 of 6 rows",  # 4 and 5; 6 is too long for the filter before
        "max_prompt_chars: 5 left out 1 of 6 rows",
    ]


def test_tokens_are_counted_with_the_system_prompt_characters_without(tmp_path: Path) -> None:
    source = _source(tmp_path, [1, 2, 3], max_prompt_chars=2, max_prompt_tokens=6, system_prompt="12345")
    rows = load_rows(source, count_tokens=_words)
    assert [len(row["prompt"]) for row in rows] == [1]  # 5 + 1 = 6 tokens pass, 5 + 2 do not; 3 characters do not


def test_limit_counts_before_the_filters(tmp_path: Path) -> None:
    assert len(load_rows(_source(tmp_path, [1, 5, 5], limit=2, min_prompt_chars=3))) == 1


def test_characters_of_all_messages_count(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"prompt": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]}\n{"prompt": "ab"}\n',
        encoding="utf-8",
    )
    assert [row["prompt"] for row in load_rows(JsonlSource(path=path, max_prompt_chars=2))] == ["ab"]


def test_filters_that_leave_nothing_are_an_error_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"rows\.jsonl: no row passes the filters: max_prompt_chars: 1 left out 2 of 2 rows"
    ):
        load_rows(_source(tmp_path, [2, 3], max_prompt_chars=1))


def test_counting_tokens_needs_something_to_count_with(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="count_tokens"):
        load_rows(_source(tmp_path, [2], max_prompt_tokens=1))
