"""Reading rows: every shape that works, and the words of every error."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.data_sections import CsvSource, HubSource, JsonlSource
from grpo_async.data.sources import first_rows, load_rows
from grpo_async.errors import ConfigError


def _jsonl(folder: Path, text: str, **settings: Any) -> JsonlSource:
    path = folder / "rows.jsonl"
    path.write_text(text, encoding="utf-8")
    return JsonlSource(path=path, **settings)


def _csv(folder: Path, text: str, **settings: Any) -> CsvSource:
    path = folder / "rows.csv"
    path.write_text(text, encoding="utf-8")
    return CsvSource(type="csv", path=path, **settings)


def _error(source: JsonlSource | CsvSource | HubSource) -> str:
    with pytest.raises(ConfigError) as caught:
        load_rows(source)
    return str(caught.value)


def test_jsonl_rows_keep_every_column_and_skip_blank_lines(tmp_path: Path) -> None:
    text = '{"prompt": "1+1", "answer": "2", "level": 3}\n\n{"prompt": [{"role": "user", "content": "ü"}]}'
    assert load_rows(_jsonl(tmp_path, text)) == [
        {"prompt": "1+1", "answer": "2", "level": 3},
        {"prompt": [{"role": "user", "content": "ü"}], "answer": None, "level": None},
    ]


def test_a_column_that_some_rows_lack_is_none_there_and_noted(tmp_path: Path) -> None:
    rows = load_rows(_jsonl(tmp_path, '{"prompt": "a", "level": 1}\n{"prompt": "b"}\n{"prompt": "c"}\n'))
    assert [row["level"] for row in rows] == [1, None, None]
    assert rows.notes == [
        f"column `level` is missing in 2 of 3 rows (the first: {tmp_path / 'rows.jsonl'}:2); it is None there"
    ]


def test_rows_know_their_places(tmp_path: Path) -> None:
    rows = load_rows(_jsonl(tmp_path, '{"prompt": "a"}\n\n{"prompt": "b"}\n'))
    path = tmp_path / "rows.jsonl"
    assert rows.places == [f"{path}:1", f"{path}:3"]
    assert rows.take([1]).places == [f"{path}:3"]


def test_repeated_prompts_are_counted_and_kept(tmp_path: Path) -> None:
    text = '{"prompt": "Add 1 and 1"}\n{"prompt": "b"}\n{"prompt": "add  1 and 1 "}\n{"prompt": "b"}\n'
    rows = load_rows(_jsonl(tmp_path, text))
    assert len(rows) == 4
    (note,) = rows.notes
    assert note.startswith("2 of 4 rows repeat the prompt of an earlier row")
    assert "rows.jsonl:3 repeats" in note
    seeds = '{"prompt": "Play.", "seed": 1}\n{"prompt": "Play.", "seed": 2}\n'
    assert load_rows(_jsonl(tmp_path, seeds, task_columns=["seed"])).notes == []


def test_the_first_rows_ignore_filters(tmp_path: Path) -> None:
    source = _jsonl(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\n{broken', min_prompt_chars=99, max_prompt_tokens=1)
    assert [row["prompt"] for row in first_rows(source, 2)] == ["a", "b"]


def test_csv_values_are_text_and_may_hold_commas_and_line_breaks(tmp_path: Path) -> None:
    text = '\ufeffprompt,answer\n"a, b\nc",1\nd,2\n'  # with the byte order mark that spreadsheets write
    assert load_rows(_csv(tmp_path, text)) == [{"prompt": "a, b\nc", "answer": "1"}, {"prompt": "d", "answer": "2"}]


def test_columns_are_renamed_and_may_be_swapped(tmp_path: Path) -> None:
    source = _jsonl(tmp_path, '{"problem": "x", "a": 1, "b": 2}', columns={"problem": "prompt", "a": "b", "b": "a"})
    assert load_rows(source) == [{"prompt": "x", "b": 1, "a": 2}]


def test_limit_stops_before_a_later_broken_line_is_read(tmp_path: Path) -> None:
    source = _jsonl(tmp_path, '{"prompt": "a"}\n{"prompt": "b"}\n{broken', limit=2)
    assert [row["prompt"] for row in load_rows(source)] == ["a", "b"]


def test_a_missing_file_is_named_with_where_it_was_looked_for(tmp_path: Path) -> None:
    message = _error(JsonlSource(path=tmp_path / "no.jsonl"))
    assert f"{tmp_path / 'no.jsonl'}: there is no such file" in message
    assert str(Path.cwd()) in message


def test_a_folder_instead_of_a_file_is_an_error_about_the_path(tmp_path: Path) -> None:
    assert "cannot be read" in _error(JsonlSource(path=tmp_path))


def test_text_in_another_encoding_is_an_error_about_the_encoding(tmp_path: Path) -> None:
    path = tmp_path / "latin.jsonl"
    path.write_bytes('{"prompt": "ü"}'.encode("latin-1"))
    assert "not UTF-8" in _error(JsonlSource(path=path))


def test_an_empty_file_is_an_error(tmp_path: Path) -> None:
    assert "no rows" in _error(_jsonl(tmp_path, "\n\n"))
    assert "no rows" in _error(_csv(tmp_path, "prompt,answer\n"))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"prompt": "b"', ["rows.jsonl:3", "not valid JSON", "one complete JSON object per line"]),
        ('["b"]', ["rows.jsonl:3", "expected a JSON object", "got a list"]),
        (
            '{"question": "b", "answer": 1}',
            ["rows.jsonl:3", "no column `prompt`", "`question`, `answer`", "columns: {"],
        ),
        ('{"prompt": 7}', ["rows.jsonl:3", "must be text or a list", "a number (7)"]),
        ('{"prompt": null}', ["rows.jsonl:3", "got null"]),
        ('{"prompt": " "}', ["rows.jsonl:3", "empty text"]),
        ('{"prompt": []}', ["rows.jsonl:3", "without messages"]),
        ('{"prompt": ["b"]}', ["rows.jsonl:3", "`prompt[0]` must be a {role, content} message", "text ('b')"]),
        (
            '{"prompt": [{"role": "user", "content": "b"}, {"role": "user", "text": "b"}]}',
            ["rows.jsonl:3", "`prompt[1]` has no `content`", "it has `role`, `text`"],
        ),
        ('{"prompt": [{"content": "b"}]}', ["rows.jsonl:3", "`prompt[0]` has no `role`"]),
        (
            '{"prompt": [{"role": "user", "content": ["b"]}]}',
            ["rows.jsonl:3", "`content[0]` must be a part", "text ('b')"],
        ),
        (
            '{"prompt": [{"role": "user", "content": 5}]}',
            ["rows.jsonl:3", "its `content` must be text", "a number (5)"],
        ),
    ],
)
def test_a_broken_row_is_named_by_line_with_what_is_wrong(tmp_path: Path, line: str, words: list[str]) -> None:
    message = _error(_jsonl(tmp_path, f'{{"prompt": "a"}}\n\n{line}\n'))
    assert [word for word in words if word not in message] == []


def test_renaming_an_unknown_column_lists_those_that_exist(tmp_path: Path) -> None:
    message = _error(_jsonl(tmp_path, '{"question": "a", "answer": 1}', columns={"problem": "prompt"}))
    assert "rows.jsonl:1: `columns` renames `problem`" in message
    assert "`question`, `answer`" in message


def test_renaming_onto_an_existing_column_is_refused(tmp_path: Path) -> None:
    message = _error(_jsonl(tmp_path, '{"question": "a", "prompt": "b"}', columns={"question": "prompt"}))
    assert "two columns named `prompt`" in message


def test_a_csv_row_is_named_by_the_line_on_which_it_begins(tmp_path: Path) -> None:
    # line 1 header, lines 2-3 one row with a line break in quotes, line 4 a row that lacks a value
    message = _error(_csv(tmp_path, 'prompt,answer\n"a\nb",1\nc\n'))
    assert "rows.csv:4" in message
    assert "1 values" in message
    assert "2 columns" in message


def test_a_csv_with_an_open_quote_or_a_repeated_header_is_refused(tmp_path: Path) -> None:
    assert "rows.csv:2: this row is not valid CSV" in _error(_csv(tmp_path, 'prompt,answer\n"a,1\n'))
    assert "`prompt` more than once" in _error(_csv(tmp_path, "prompt,prompt\na,b\n"))


def test_a_hub_dataset_without_the_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real_import = builtins.__import__

    def without_datasets(name: str, *args: Any, **kwargs: Any) -> Any:
        if name == "datasets":
            raise ModuleNotFoundError("No module named 'datasets'")
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    assert "pip install 'grpo-async[hub]'" in _error(HubSource(type="hub", name="some/set"))
