"""The held-out split and the leak check."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from grpo_async.data.identity import find_leaks, split_held_out, task_key
from grpo_async.data.rows import Rows
from grpo_async.errors import ConfigError


def _rows(count: int, start: int = 0) -> Rows:
    return _named([{"prompt": f"question {number}"} for number in range(start, start + count)])


def _named(rows: list[dict[str, Any]], file: str = "f") -> Rows:
    return Rows(rows, places=[f"{file}:{number + 1}" for number in range(len(rows))])


def _prompts(rows: Rows) -> list[str]:
    return [row["prompt"] for row in rows]


def _split(rows: Rows, held_out: float, seed: int = 0) -> tuple[list[str], list[str]]:
    train, evaluation = split_held_out(rows, held_out, seed=seed, columns=())
    return _prompts(train), _prompts(evaluation)


def test_a_share_splits_into_two_disjoint_parts_of_about_that_size() -> None:
    train, held = _split(_rows(1000), 0.1)
    assert set(train) | set(held) == set(_prompts(_rows(1000)))
    assert not set(train) & set(held)
    assert 70 <= len(held) <= 130  # 100 expected, standard deviation sqrt(1000 x 0.1 x 0.9) = 9.5
    assert train == [prompt for prompt in _prompts(_rows(1000)) if prompt in set(train)]  # in their order
    assert held != sorted(held, key=lambda prompt: int(prompt.split()[1]))  # the first of them are a fair sample


@pytest.mark.parametrize("held_out", [0.1, 20])
def test_rows_added_later_move_no_row_out_of_training(held_out: float) -> None:
    train, held = _split(_rows(200), held_out)
    more_train, more_held = _split(_rows(300), held_out)
    assert not set(train) & set(more_held)
    if held_out < 1:
        assert set(held) <= set(more_held)
    shuffled = Rows(_rows(200)[::-1], places=["x"] * 200)
    assert set(_split(shuffled, held_out)[1]) == set(held)
    assert more_train


def test_a_number_is_met_exactly_and_a_seed_chooses_others() -> None:
    assert len(_split(_rows(200), 20)[1]) == 20
    assert set(_split(_rows(200), 20, seed=1)[1]) != set(_split(_rows(200), 20)[1])


@pytest.mark.parametrize("held_out", [0.3, 7])
def test_rows_of_one_task_stay_on_one_side(held_out: float) -> None:
    rows = _named(
        [{"prompt": f"Question  {number % 20}" if number % 3 else f"question {number % 20}"} for number in range(60)]
    )
    train, evaluation = split_held_out(rows, held_out, seed=0, columns=())
    assert len(train) + len(evaluation) == 60
    assert find_leaks(train, evaluation, ()) is None


def test_the_split_is_the_same_in_every_process() -> None:
    code = """
from tests.data.test_held_out import _rows, _split
print(_split(_rows(30), 5)[1])
"""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for seed in ("1", "2")
    }
    # pinned: evaluation on another machine or Python version must be on the same rows
    assert outputs == {f"{_split(_rows(30), 5)[1]}\n"}
    assert _split(_rows(30), 3)[1] == ["question 15", "question 5", "question 26"]


@pytest.mark.parametrize(("held_out", "words"), [(1e-9, "no row is held out"), (5, "all rows are held out")])
def test_an_empty_side_is_refused(held_out: float, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        _split(_rows(5), held_out)


def test_leaks_are_found_through_case_white_space_and_form() -> None:
    train = _named([{"prompt": "What is  2+2?"}, {"prompt": "other"}], "train")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "what is 2+2? "}]
    evaluation = _named([{"prompt": "new"}, {"prompt": messages}], "eval")
    assert find_leaks(train, evaluation, ()) == (
        "1 of 2 prompts to evaluate on are trained on as well: eval:2 is also train:1"
    )
    assert find_leaks(train, _named([{"prompt": "2+2"}]), ()) is None


def test_three_leaks_are_shown_and_the_others_counted() -> None:
    leaks = find_leaks(_rows(5), _rows(5), ())
    assert leaks is not None
    assert leaks.count(" is also ") == 3
    assert leaks.endswith("; and 2 more")


def test_task_columns_tell_rows_of_one_prompt_apart() -> None:
    one, two = {"prompt": "Play.", "seed": 1, "note": "x"}, {"prompt": "Play.", "seed": 2, "note": "x"}
    assert task_key(one, ()) == task_key(two, ())
    assert task_key(one, ["seed"]) != task_key(two, ["seed"])
    assert task_key({**one, "note": "y"}, ["seed"]) == task_key(one, ["seed"])


def test_an_empty_prompt_is_compared_by_all_columns() -> None:
    empty = [{"role": "user", "content": " "}]
    assert task_key({"prompt": empty, "board": "a"}, ()) != task_key({"prompt": empty, "board": "b"}, ())
    assert task_key({"prompt": empty, "board": "a"}, ()) == task_key({"prompt": empty, "board": "a"}, ())
