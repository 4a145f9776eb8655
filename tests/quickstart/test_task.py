"""The quickstart's sums and their split."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_async.quickstart.task import ChainSum, all_sums, held_out_sums, training_sums, write_rows


def test_a_sum_reads_and_adds_up_as_worked_out_by_hand() -> None:
    item = ChainSum((3, 4, -2, 1))
    assert item.prompt == "3 + 4 - 2 + 1 ="
    assert item.answer == 6
    assert item.steps == ["3 + 4 = 7", "7 - 2 = 5", "5 + 1 = 6"]


def test_every_intermediate_result_is_one_digit() -> None:
    results = {int(step.rpartition("= ")[2]) for item in all_sums() for step in item.steps}
    assert results == set(range(10))


def test_prompt_and_answer_agree_for_every_expression() -> None:
    for item in all_sums():
        assert eval(item.prompt.removesuffix("=")) == item.answer  # digits and signs that we wrote ourselves
        assert item.steps[-1].endswith(f"= {item.answer}")


def test_the_split_covers_every_expression_once_and_holds_out_enough() -> None:
    train, held_out = {item.prompt for item in training_sums()}, {item.prompt for item in held_out_sums()}
    assert not train & held_out
    assert len(train) + len(held_out) == len(all_sums()) == 2012
    assert len(held_out) >= 200  # what configs/quickstart.yaml evaluates; one in eight is 251


def test_no_held_out_sum_is_a_reordered_training_sum() -> None:
    assert not {tuple(sorted(i.terms)) for i in training_sums()} & {tuple(sorted(i.terms)) for i in held_out_sums()}


def test_rows_are_the_same_bytes_for_the_same_seed_and_only_reordered_by_another(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("again", 0), ("b", 1)):
        write_rows(tmp_path / name, held_out_sums(), seed=seed)
    first, again, other = ((tmp_path / name).read_bytes() for name in ("a", "again", "b"))
    assert first == again != other
    assert sorted(first.splitlines()) == sorted(other.splitlines())


def test_the_first_200_held_out_rows_hold_many_answers(tmp_path: Path) -> None:
    # evaluation takes the first N rows, so they must not be a corner of the task
    write_rows(tmp_path / "rows", held_out_sums(), seed=0)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()[:200]]
    answers = [row["answer"] for row in rows]
    assert max(answers.count(answer) for answer in answers) / 200 < 0.2
    assert len({row["prompt"][0]["content"][0] for row in rows}) == 5


def test_writing_to_a_missing_folder_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_rows(tmp_path / "no" / "rows", held_out_sums(), seed=0)
