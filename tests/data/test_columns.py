"""Dropped and renamed columns, nested ones too."""

from __future__ import annotations

import pytest

from grpo_async.data.sources import drop, rename
from grpo_async.errors import ConfigError

# As verl writes it.
ROW = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "2+2"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "tries": [{"answer": "5"}, {"answer": "4"}]},
}


def test_a_dotted_name_takes_a_nested_value_and_leaves_its_column() -> None:
    renamed = rename(ROW, {"reward_model.ground_truth": "answer", "extra_info.tries.0.answer": "wrong"}, "f:1")
    assert renamed == {**ROW, "answer": "4", "wrong": "5"}


def test_a_column_whose_own_name_has_a_dot_is_meant_first() -> None:
    row = {"a": {"b": 1}, "a.b": 2}
    assert rename(row, {"a.b": "c"}, "f:1") == {"a": {"b": 1}, "c": 2}


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("reward_model.truth", "but `reward_model` has no `truth`; it has `style`, `ground_truth`"),
        ("reward_modle.ground_truth", "not a column here"),
        ("data_source.name", "but `data_source` is text ('gsm8k'), which has nothing below it"),
        ("extra_info.tries.2.answer", "but `extra_info.tries` is a list of 2 without an entry `2`"),
    ],
)
def test_a_nested_name_that_leads_nowhere_says_where_it_stops(path: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rename(ROW, {path: "answer"}, "train.parquet, row 3")
    assert str(caught.value).startswith(f"train.parquet, row 3: `columns` renames `{path}`")
    assert words in str(caught.value)


def test_a_near_name_is_suggested() -> None:
    with pytest.raises(ConfigError, match="did you mean `reward_model`"):
        rename(ROW, {"reward_modle.ground_truth": "answer"}, "f:1")


def test_a_nested_name_must_not_overwrite_a_column() -> None:
    with pytest.raises(ConfigError, match="two columns named `data_source`"):
        rename(ROW, {"extra_info.split": "data_source"}, "f:1")


def test_dropped_columns_make_room_and_must_exist() -> None:
    assert drop({"a": 1, "b": 2}, ["a"], "f:1") == {"b": 2}
    with pytest.raises(ConfigError, match="f:1: `drop` names `c`, which is not a column here; the columns are `a`"):
        drop({"a": 1}, ["c"], "f:1")


def test_columns_written_the_wrong_way_round_are_recognised() -> None:
    with pytest.raises(ConfigError, match=r"old: new, so perhaps `\{question: prompt\}`"):
        rename({"question": "1 + 1", "answer": "2"}, {"prompt": "question"}, "f.jsonl:1")
