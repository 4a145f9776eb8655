"""All data of a run: the held-out split, evaluation rows from either source, leaks, notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.sections import DataSection, EvaluationSection
from grpo_async.data.identity import find_leaks, split_held_out, task_key
from grpo_async.data.load import LoadedData, load_data
from grpo_async.data.rows import Rows
from grpo_async.errors import ConfigError


def _named(rows: list[dict[str, Any]], file: str = "f") -> Rows:
    return Rows(rows, locations=[f"{file}:{number + 1}" for number in range(len(rows))])


def _rows(count: int) -> Rows:
    return _named([{"prompt": f"question {number}"} for number in range(count)])


def _split(rows: Rows, held_out: float) -> tuple[list[str], list[str]]:
    train, evaluation = split_held_out(rows, held_out, columns=())
    return [row["prompt"] for row in train], [row["prompt"] for row in evaluation]


def test_a_share_splits_into_two_disjoint_parts_of_about_that_size_and_a_number_is_met() -> None:
    every = [row["prompt"] for row in _rows(1000)]
    train, held = _split(_rows(1000), 0.1)
    assert sorted(train + held) == sorted(every)
    assert 70 <= len(held) <= 130  # 100 expected, standard deviation sqrt(1000 x 0.1 x 0.9) = 9.5
    assert train == [prompt for prompt in every if prompt in set(train)]  # in their order
    assert held != sorted(held, key=lambda prompt: int(prompt.split()[1]))  # the first of them are a fair sample
    assert len(_split(_rows(200), 20)[1]) == 20
    for held_out, words in ((1e-9, "no row is held out"), (5, "all rows are held out")):
        with pytest.raises(ConfigError, match=words):
            _split(_rows(5), held_out)


@pytest.mark.parametrize("held_out", [0.1, 20])
def test_rows_added_later_move_no_row_out_of_training(held_out: float) -> None:
    train, held = _split(_rows(200), held_out)
    more_held = _split(_rows(300), held_out)[1]
    assert not set(train) & set(more_held)
    if held_out < 1:
        assert set(held) <= set(more_held)
    assert set(_split(Rows(_rows(200)[::-1], locations=["x"] * 200), held_out)[1]) == set(held)


@pytest.mark.parametrize("held_out", [0.3, 7])
def test_rows_of_one_task_stay_on_one_side(held_out: float) -> None:
    rows = _named(
        [{"prompt": f"Question  {number % 20}" if number % 3 else f"question {number % 20}"} for number in range(60)]
    )
    train, evaluation = split_held_out(rows, held_out, columns=())
    assert len(train) + len(evaluation) == 60
    assert find_leaks(train, evaluation, ()) is None


def test_the_split_is_the_same_in_every_process() -> None:
    # pinned: evaluation on another machine or Python version must be on the same rows
    assert _split(_rows(30), 3)[1] == ["question 15", "question 5", "question 26"]


def test_leaks_are_found_through_case_white_space_and_form() -> None:
    train = _named([{"prompt": "What is  2+2?"}, {"prompt": "other"}], "train")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "what is 2+2? "}]
    assert find_leaks(train, _named([{"prompt": "new"}, {"prompt": messages}], "eval"), ()) == (
        "1 of 2 prompts to evaluate on are trained on as well: eval:2 is also train:1"
    )
    assert find_leaks(train, _named([{"prompt": "2+2"}]), ()) is None


def test_task_columns_and_those_of_an_empty_prompt_tell_rows_apart() -> None:
    one, two = {"prompt": "Play.", "seed": 1, "note": "x"}, {"prompt": "Play.", "seed": 2, "note": "x"}
    assert task_key(one, ()) == task_key(two, ())
    assert task_key(one, ["seed"]) != task_key(two, ["seed"])
    assert task_key({**one, "note": "y"}, ["seed"]) == task_key(one, ["seed"])
    empty = [{"role": "user", "content": " "}]
    assert task_key({"prompt": empty, "board": "a"}, ()) != task_key({"prompt": empty, "board": "b"}, ())
    assert task_key({"prompt": empty, "board": "a"}, ()) == task_key({"prompt": empty, "board": "a"}, ())


def _file(folder: Path, name: str, prompts: list[str]) -> dict[str, Any]:
    path = folder / name
    path.write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts), encoding="utf-8")
    return {"type": "jsonl", "path": path}


def _load(train: Any, evaluation: dict[str, Any] | None = None, **data: Any) -> LoadedData:
    section = None if evaluation is None else EvaluationSection.model_validate(evaluation)
    return load_data(DataSection.model_validate({"train": train, **data}), section)


NUMBERS = [f"question {number}" for number in range(40)]


def test_held_out_rows_have_the_system_prompt_of_the_training_data_and_another_source_its_own(tmp_path: Path) -> None:
    train = _file(tmp_path, "t.jsonl", NUMBERS) | {"system_prompt": "Be brief."}
    loaded = _load(train, {"num_prompts": 5}, held_out=8)
    kept, evaluated = loaded.train["data.train"], loaded.evaluation["data.train"]
    assert (len(kept.rows), len(evaluated.rows)) == (32, 5)  # 8 held out, the first 5 used
    assert kept.system_prompt == evaluated.system_prompt == "Be brief."
    own = {"data": _file(tmp_path, "e.jsonl", ["c", "d"]) | {"system_prompt": "Hm."}, "num_prompts": 1}
    evaluated = _load(train, own).evaluation["evaluation.data"]
    assert ([row["prompt"] for row in evaluated.rows], evaluated.system_prompt) == (["c"], "Hm.")


def test_each_of_several_sources_is_held_out_from_and_compared_with_all_rows_to_evaluate_on(tmp_path: Path) -> None:
    own = {"rewards": ["exact"], "weight": 3, "temperature": 0.5, "group_size": 4}
    one = _file(tmp_path, "one.jsonl", NUMBERS) | own
    two = _file(tmp_path, "two.jsonl", ["a", "b", "c", "d", "e"]) | {"label": "letters", "environment": "game"}
    loaded = _load([one, two], {"num_prompts": 3}, held_out=4)
    found = [(source.label, source.weight, source.rewards, len(source.rows)) for source in loaded.train.values()]
    assert found == [("one", 3.0, ["exact"], 36), ("letters", 1.0, None, 1)]
    assert [(s.label, len(s.rows)) for s in loaded.evaluation.values()] == [("one", 3), ("letters", 3)]
    every = [*loaded.train.values(), *loaded.evaluation.values()]
    assert [source.temperature for source in every] == [0.5, None, None, None]  # evaluations have their own
    assert {row.get("environment") for row in loaded.train["data.train.1"].rows} == {"game"}
    evaluation = [_file(tmp_path, "e.jsonl", ["b", "y"]), _file(tmp_path, "f.jsonl", ["x", "z"])]
    with pytest.raises(ConfigError, match=r"1 of 4 prompts .*e\.jsonl:1 is also .*two\.jsonl:2"):
        _load([one, {**two, "environment": None}], {"data": evaluation})


def test_a_leak_is_an_error_a_note_or_nothing(tmp_path: Path) -> None:
    train, evaluation = _file(tmp_path, "t.jsonl", ["a", "b"]), _file(tmp_path, "e.jsonl", ["c", "B "])
    with pytest.raises(
        ConfigError, match=r"evaluation\.data: 1 of 2 prompts .*e\.jsonl:2 is also .*t\.jsonl:2.*leak_check: warn"
    ):
        _load(train, {"data": evaluation})
    (note,) = _load(train, {"data": evaluation, "leak_check": "warn"}).notes
    assert "1 of 2 prompts to evaluate on are trained on as well" in note
    assert _load(train, {"data": evaluation, "leak_check": "off"}).notes == ()


def test_environments_leak_by_seed(tmp_path: Path) -> None:
    source = {"type": "environment", "num_prompts": 10, "prompt": "Play."}
    with pytest.raises(ConfigError, match=r"seed 9 is also seed 9.*`first_seed`"):
        _load(source, {"data": source | {"first_seed": 9}})
    assert _load(source, {"data": source | {"first_seed": 10}}).notes == ()
