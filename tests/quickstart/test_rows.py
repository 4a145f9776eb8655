"""The order of the rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_async.quickstart.prepare import write_rows
from grpo_async.quickstart.tasks import TASKS

TASK = TASKS["think"]
ROWS = [TASK.row(item) for item in TASK.held_out_items()]


def test_rows_are_the_same_bytes_for_the_same_seed_and_only_reordered_by_another(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("again", 0), ("b", 1)):
        write_rows(tmp_path / name, ROWS, seed=seed)
    first, again, other = ((tmp_path / name).read_bytes() for name in ("a", "again", "b"))
    assert first == again != other
    assert sorted(first.splitlines()) == sorted(other.splitlines())


def test_the_first_200_held_out_rows_hold_many_answers(tmp_path: Path) -> None:
    # evaluation takes the first N rows, so they must not be a corner of the task
    write_rows(tmp_path / "rows", ROWS, seed=0)
    rows = [json.loads(line) for line in (tmp_path / "rows").read_text().splitlines()[:200]]
    answers = [row["answer"] for row in rows]
    assert max(answers.count(answer) for answer in answers) / 200 < 0.2
    assert len({row["prompt"][0]["content"][0] for row in rows}) == 5


def test_writing_to_a_missing_folder_fails(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        write_rows(tmp_path / "no" / "rows", ROWS, seed=0)
