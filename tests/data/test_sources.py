"""Rows from every source: every shape that works, and errors that name location, column and remedy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter

from grpo_async.config.sections import JsonlSource, Source
from grpo_async.data import Rows, first_rows, load_rows, make_prompt, readers
from grpo_async.data.messages import check_prompt
from grpo_async.data.sources import remove_columns, rename
from grpo_async.errors import ConfigError
from grpo_async.records import Prompt
from tests.data import generators

USER = {"role": "user", "content": "q"}


def _load(kind: str, **settings: Any) -> Rows:
    return load_rows(TypeAdapter(Source).validate_python({"type": kind, **settings}), count_tokens=_characters)


def _file(folder: Path, text: str, **settings: Any) -> Rows:
    """Rows of a file of JSON lines."""
    path = folder / "rows.txt"
    path.write_text(text, encoding="utf-8")
    return _load("jsonl", path=path, **settings)


def _characters(prompt: Prompt) -> int:
    return sum(len(message.content) for message in prompt.messages)


def _error(kind: str, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        _load(kind, **settings)
    return str(caught.value)


def _prompts(rows: Rows) -> list[Any]:
    return [row["prompt"] for row in rows]


# ---- files ----


def test_jsonl_rows_keep_every_column_their_places_and_what_some_lack_is_none(tmp_path: Path) -> None:
    rows = _file(tmp_path, '{"prompt": "1+1", "level": 3}\n\n{"prompt": [{"role": "user", "content": "ü"}]}')
    assert rows == [
        {"prompt": "1+1", "level": 3},
        {"prompt": [{"role": "user", "content": "ü"}], "level": None},
    ]
    path = tmp_path / "rows.txt"
    assert rows.locations == [f"{path}:1", f"{path}:3"]


def test_limit_and_the_first_rows_stop_before_a_later_broken_line_is_read(tmp_path: Path) -> None:
    text = '{"prompt": "a"}\n{"prompt": "b"}\n{broken'
    assert _prompts(_file(tmp_path, text, limit=2)) == ["a", "b"]
    unfiltered = {"path": tmp_path / "rows.txt", "max_prompt_tokens": 1}
    assert _prompts(first_rows(TypeAdapter(Source).validate_python(unfiltered), 2)) == ["a", "b"]


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("jsonl", '{"prompt": "a"}\n\n{"prompt": "b"', "rows.txt:3: this line cannot be read as JSON"),
        ("jsonl", '{"prompt": "a\\ud83d"}', "rows.txt:1: `prompt` holds '\\ud83d', half a character"),
        ("parquet", '{"prompt": "a"}\n', "cannot be read as Parquet"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_by_line(tmp_path: Path, kind: str, content: str, words: str) -> None:
    (tmp_path / "rows.txt").write_text(content, encoding="utf-8")
    assert words in _error(kind, path=tmp_path / "rows.txt")


def _parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_parquet_is_read_in_batches_and_a_folder_in_the_order_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_BATCH_ROWS", 2)
    _parquet(tmp_path / "b.parquet", [{"prompt": "b0"}])
    whole = _parquet(tmp_path / "a.parquet", [{"prompt": f"a{number}"} for number in range(5)])
    rows = _load("parquet", path=tmp_path)
    assert _prompts(rows) == ["a0", "a1", "a2", "a3", "a4", "b0"]
    assert rows.locations[4:] == [f"{whole}, row 4", f"{tmp_path / 'b.parquet'}, row 0"]


def _call(name: str, **arguments: Any) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}


@pytest.mark.parametrize("how", ["parquet", "parquet of datasets", "parquet of JSON", "hub", "hub of JSON", "jsonl"])
def test_messages_have_no_nulls_but_those_that_were_written(tmp_path: Path, datasets: Any, how: str) -> None:
    """Arrow fills each message and each call's arguments with the keys of all others (datasets#7617)."""
    prompts = [
        [{"role": "user", "content": "1+1"}, _call("add", a=1, deep=[{"u": 1}, {"v": 2}])],
        [{"role": "user", "content": "?"}, _call("find", city="X"), {"role": "tool", "content": "3", "name": "find"}],
    ]
    keeps_own = "JSON" in how or how == "jsonl"  # Arrow's and the user's cannot be told apart in a struct
    if keeps_own:
        prompts.append([{"role": "user", "content": "?"}, _call("find", city=None)])
    rows = [{"prompt": prompt, "info": {f"key{number}": number}} for number, prompt in enumerate(prompts)]
    made = datasets.Dataset.from_list(rows, on_mixed_types="use_json" if "JSON" in how else None)
    path = tmp_path / "rows"
    if how.startswith("hub"):
        made.save_to_disk(str(path))
    elif how == "jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif how == "parquet":
        _parquet(path, rows)
    else:
        made.to_parquet(str(path))
    loaded = _load(how.split()[0], **({"name": str(path)} if how.startswith("hub") else {"path": path}))
    assert [row["prompt"] for row in loaded] == prompts
    others = {} if keeps_own else {"key1": None}  # a column of one's own is as Arrow, and TRL, have it
    assert loaded[0]["info"] == {"key0": 0, **others}


# ---- hub: local folders through the real `datasets` ----


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    return datasets


def test_a_saved_dataset_gives_python_values_whatever_its_format(tmp_path: Path, datasets: Any) -> None:
    folder = str(tmp_path / "saved")
    made = datasets.Dataset.from_dict({"prompt": ["a", "b"], "level": [0, 1]})
    made.with_format("numpy").save_to_disk(folder)
    rows = _load("hub", name=folder)
    assert rows == [{"prompt": "a", "level": 0}, {"prompt": "b", "level": 1}]
    assert type(rows[0]["level"]) is int
    assert rows.locations[1] == f"{folder} [train], row 1"


def test_splits_of_saved_collections_and_folders_of_files_are_taken_by_name(tmp_path: Path, datasets: Any) -> None:
    one = datasets.Dataset.from_dict({"prompt": ["b"]})
    datasets.DatasetDict({"train": one, "test": one}).save_to_disk(tmp_path / "saved")
    assert _prompts(_load("hub", name=str(tmp_path / "saved"), split="test")) == ["b"]
    for split in ("train", "test"):
        (tmp_path / "files").mkdir(exist_ok=True)
        (tmp_path / f"files/{split}.jsonl").write_text(json.dumps({"prompt": split}) + "\n", encoding="utf-8")
    assert _load("hub", name=str(tmp_path / "files"), split="test") == [{"prompt": "test"}]


# ---- functions and seeds ----


def _generated(function: str, **settings: Any) -> Rows:
    return _load("generator", function=f"tests.data.generators:{function}", **settings)


def test_a_generator_gets_its_arguments_and_its_rows_are_named() -> None:
    rows = _generated("sums", arguments={"num_rows": 3, "seed": 1})
    assert len(rows) == 3
    assert rows != _generated("sums", arguments={"num_rows": 3, "seed": 2})
    assert rows.locations[2] == "tests.data.generators:sums, row 2"
    assert _generated("as_list") == [{"prompt": "a"}, {"prompt": "b"}]


def test_a_generator_without_end_needs_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "MAX_ROWS", 50)
    assert len(_generated("endless", limit=60)) == 60
    with pytest.raises(ConfigError, match="has made 50 rows and not come to an end; set `limit`"):
        _generated("endless")
    assert len(_generated("sums", arguments={"num_rows": 50})) == 50


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("raises_at_two", "row 2: the function raised ZeroDivisionError: no third one (" + generators.__file__),
        ("unseeded", "row 0: a second call of the function makes another row"),
    ],
)
def test_a_bad_generator_is_named_with_the_row(function: str, words: str) -> None:
    with pytest.raises(ConfigError, match=r"tests\.data\.generators") as caught:
        _generated(function, limit=20)
    assert words in str(caught.value)


def test_rows_of_environments_are_seeds_in_turn() -> None:
    rows = _load("environment", num_prompts=3, first_seed=5)
    assert rows == [{"prompt": [{"role": "user", "content": ""}], "seed": seed} for seed in (5, 6, 7)]
    assert make_prompt(rows[0], 0, None).columns == {"seed": 5}
    rows = _load("environment", num_prompts=3, prompt="Play.", environments=["a", "b"])
    assert [(row["seed"], row["environment"]) for row in rows] == [(0, "a"), (1, "b"), (2, "a")]
    assert rows.notes == []  # one prompt, but not one task


# ---- prompts ----


def _checked(*messages: Any) -> Any:
    return check_prompt({"prompt": list(messages)}, "f:1", set())


def test_messages_are_brought_into_one_form() -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    answer = {"role": "tool", "content": "1", "name": "add", "tool_call_id": "abcdefghi"}
    for content in ({}, {"content": None}):
        assert _checked(USER, {"role": "assistant", "tool_calls": [call], **content}, answer) == [
            USER, {"role": "assistant", "content": "", "tool_calls": [call]}, answer,
        ]  # fmt: skip
    wanted = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    for call in (
        {"name": "add", "arguments": '{"a": 1}'},
        {"function": {"name": "add", "arguments": {"a": 1}}, "id": None},
    ):
        assert _checked({"role": "assistant", "tool_calls": [call]})[0]["tool_calls"] == [wanted]
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]
    assert _checked({"role": "user", "content": parts}) == [{"role": "user", "content": "2+2"}]
    with pytest.raises(ConfigError, match=r"^f:1: `prompt\[1\].*only text"):
        _checked(USER, {"role": "user", "content": [{"type": "image", "url": "x"}]})
    assert _checked({**USER, "tool_calls": None, "name": None, "weight": None, "id": 7}) == [USER]


# ---- columns and filters ----


def test_columns_are_renamed_swapped_dropped_and_taken_from_inside_others() -> None:
    row = {"reward_model": {"ground_truth": "4"}, "extra_info": {"tries": [{"answer": "5"}]}}  # as verl writes it
    renamed = rename(row, {"reward_model.ground_truth": "answer", "extra_info.tries.0.answer": "wrong"}, "f:1")
    assert renamed == {**row, "answer": "4", "wrong": "5"}
    with pytest.raises(ConfigError, match="there is no `truth`; there is `ground_truth`"):
        rename(row, {"reward_model.truth": "answer"}, "f:1")
    assert rename({"a": {"b": 1}, "a.b": 2}, {"a.b": "c"}, "f:1") == {"a": {"b": 1}, "c": 2}  # its own name comes first
    assert rename({"x": 0, "a": 1, "b": 2}, {"x": "y", "a": "b", "b": "a"}, "f:1") == {"y": 0, "b": 1, "a": 2}
    assert remove_columns({"a": 1, "b": 2}, ["a"], "f:1") == {"b": 2}


def _of_lengths(folder: Path, *lengths: int, **settings: Any) -> Rows:
    return _file(folder, "".join(json.dumps({"prompt": "x" * length}) + "\n" for length in lengths), **settings)


def test_each_filter_counts_what_it_left_out(tmp_path: Path) -> None:
    rows = _of_lengths(tmp_path, 5, 2, 3, 4, max_prompt_tokens=3)
    assert [len(row["prompt"]) for row in rows] == [2, 3]
    assert [location.rpartition(":")[2] for location in rows.locations] == ["2", "3"]
    assert rows.notes == ["max_prompt_tokens: 3 left out 2 of 4 rows"]
    # 5 + 1 = 6 tokens pass, 5 + 2 do not
    rows = _of_lengths(tmp_path, 1, 2, max_prompt_tokens=6, system_prompt="12345")
    assert [len(row["prompt"]) for row in rows] == [1]
    assert len(_of_lengths(tmp_path, 5, 1, 1, limit=2, max_prompt_tokens=3)) == 1  # the limit comes first


def test_rows_without_a_prompt_get_an_empty_one_where_an_environment_gives_the_text(tmp_path: Path) -> None:
    """As in TRL, where a dataset may have the column `environment` alone."""
    path = tmp_path / "train.jsonl"
    path.write_text('{"environment": "coding"}\n{"environment": "game", "prompt": "Play."}\n')
    source = JsonlSource(path=path)
    rows = load_rows(source, needs_prompt=False)
    assert [row["prompt"] for row in rows] == [[{"role": "user", "content": ""}], "Play."]
    with pytest.raises(ConfigError, match="there is no column `prompt`"):
        load_rows(source)
