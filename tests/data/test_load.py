"""All data of a run: evaluation rows from either place, leaks, notes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.data_sections import DataSection, EvaluationSection
from grpo_async.data.load import LoadedData, load_data
from grpo_async.errors import ConfigError


def _file(folder: Path, name: str, prompts: list[str]) -> dict[str, Any]:
    path = folder / name
    path.write_text("".join(f'{{"prompt": "{prompt}"}}\n' for prompt in prompts), encoding="utf-8")
    return {"type": "jsonl", "path": path}


def _load(train: dict[str, Any], evaluation: dict[str, Any] | None = None, **data: Any) -> LoadedData:
    section = None if evaluation is None else EvaluationSection.model_validate(evaluation)
    return load_data(DataSection.model_validate({"train": train, **data}), section)


NUMBERS = [f"question {number}" for number in range(40)]


def test_without_evaluation_there_are_only_rows_to_train_on(tmp_path: Path) -> None:
    loaded = _load(_file(tmp_path, "t.jsonl", ["a", "b"]))
    assert [row["prompt"] for row in loaded.train] == ["a", "b"]
    assert loaded.evaluation is None
    assert loaded.notes == ()


def test_held_out_rows_are_evaluated_on_with_the_system_prompt_of_the_training_data(tmp_path: Path) -> None:
    train = _file(tmp_path, "t.jsonl", NUMBERS) | {"system_prompt": "Be brief."}
    loaded = _load(train, {"num_prompts": 5}, held_out=8)
    assert (len(loaded.train), loaded.evaluation and len(loaded.evaluation)) == (32, 5)  # 8 held out, the first 5 used
    assert loaded.evaluation_system_prompt == loaded.train_system_prompt == "Be brief."
    assert loaded.notes == ("data.held_out: 8 rows are held out, 32 are left to train on",)


def test_another_source_has_its_own_system_prompt_and_is_cut_to_its_number(tmp_path: Path) -> None:
    evaluation = {"data": _file(tmp_path, "e.jsonl", ["c", "d", "a"]) | {"system_prompt": "Hm."}, "num_prompts": 2}
    loaded = _load(_file(tmp_path, "t.jsonl", ["a", "b"]), evaluation)  # the leak `a` is not among the two
    assert loaded.evaluation is not None
    assert [row["prompt"] for row in loaded.evaluation] == ["c", "d"]
    assert (loaded.train_system_prompt, loaded.evaluation_system_prompt) == (None, "Hm.")


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


def test_evaluation_without_rows_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.data: there is none"):
        _load(_file(tmp_path, "t.jsonl", ["a"]), {"num_prompts": 5})


def test_errors_and_notes_say_which_section_they_are_about(tmp_path: Path) -> None:
    train = _file(tmp_path, "t.jsonl", ["a", "bb"]) | {"max_prompt_chars": 1}
    missing = {"data": {"type": "jsonl", "path": tmp_path / "no.jsonl"}}
    with pytest.raises(ConfigError, match=r"^evaluation\.data: .*no\.jsonl: there is no such file"):
        _load(train, missing)
    assert _load(train).notes == ("data.train: max_prompt_chars: 1 left out 1 of 2 rows",)
