"""prepare(): once, whole, reproducible, and never over somebody else's files. A warmup of two steps stands for the real one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_async.config.sections import JsonlSource
from grpo_async.data import load_rows
from grpo_async.errors import ConfigError
from grpo_async.quickstart import default_folder, prepare
from grpo_async.quickstart.model import MAX_VOCABULARY
from grpo_async.quickstart.tasks import TASKS
from grpo_async.quickstart.tasks.base import WarmupRecipe

SHORT = WarmupRecipe(num_steps=2, batch_size=4)


def _silent(line: str) -> None:
    del line


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("quickstart") / "seed_0"
    prepare(folder, recipe=SHORT, report=_silent)
    return folder


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_folder_holds_a_loadable_model_and_rows_and_nothing_is_left_beside_it(prepared: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    parts = prepare(prepared, recipe=SHORT, report=_silent)
    model = AutoModelForCausalLM.from_pretrained(parts.model)
    tokenizer = AutoTokenizer.from_pretrained(parts.model)
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.head_dim == 32  # vLLM's CPU attention refuses 24, which 96 / 4 would give
    assert 300_000 < sum(parameter.numel() for parameter in model.parameters()) < 400_000
    assert (
        tokenizer.eos_token_id == model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    )
    train, held_out = (load_rows(JsonlSource(path=path)) for path in (parts.train, parts.heldout))
    assert {"prompt", "answer"} == set(train[0]) == set(held_out[0])
    assert [path.name for path in prepared.parent.iterdir()] == [prepared.name]


def test_a_second_call_returns_at_once_and_touches_nothing(prepared: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    lines: list[str] = []
    parts = prepare(prepared, recipe=SHORT, report=lines.append)
    assert lines == []
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before
    assert parts.model == prepared / "model"


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(prepared: Path, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(99)  # what the caller drew before must not matter
    prepare(tmp_path / "again", recipe=SHORT, report=_silent)
    assert _content(tmp_path / "again") == _content(prepared)
    prepare(tmp_path / "other", seed=1, recipe=SHORT, report=_silent)
    other, first = _content(tmp_path / "other"), _content(prepared)
    assert {name for name in first if first[name] != other[name]} == {
        "prepared.json",
        "train.jsonl",
        "heldout.jsonl",
        "model/model.safetensors",
    }


def test_another_recipe_or_force_makes_it_again(tmp_path: Path) -> None:
    folder = tmp_path / "made"
    prepare(folder, recipe=SHORT, report=_silent)
    weights = (folder / "model" / "model.safetensors").read_bytes()
    prepare(folder, recipe=WarmupRecipe(num_steps=3, batch_size=4), report=_silent)
    assert (folder / "model" / "model.safetensors").read_bytes() != weights
    (folder / "train.jsonl").write_text("damaged")
    prepare(folder, recipe=WarmupRecipe(num_steps=3, batch_size=4), force=True, report=_silent)
    assert json.loads((folder / "train.jsonl").read_text().splitlines()[0])["answer"]
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_files_of_others_are_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(ConfigError, match="did not make"):
            prepare(tmp_path, force=force, recipe=SHORT, report=_silent)
    assert (tmp_path / "thesis.txt").read_text() == "mine"


@pytest.mark.parametrize("task", [name for name in TASKS if name != "think"])
def test_every_task_makes_its_own_rows_and_a_model_that_knows_its_words(task: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    parts = prepare(tmp_path / "made", task=task, recipe=SHORT, report=_silent)
    train, held_out = (load_rows(JsonlSource(path=path)) for path in (parts.train, parts.heldout))
    assert len(train) > len(held_out) >= 20
    columns = {"tool": {"answer"}, "game": {"low", "high", "target"}, "code": {"tests"}, "reasoning_gym": {"answer"}}
    assert set(train[0]) == {"prompt"} | columns[task]
    tokenizer = AutoTokenizer.from_pretrained(parts.model)
    assert len(tokenizer) <= MAX_VOCABULARY
    assert json.loads((tmp_path / "made" / "prepared.json").read_text())["task"] == task


def test_a_folder_of_another_task_is_made_again_and_an_unknown_task_is_refused(tmp_path: Path) -> None:
    prepare(tmp_path / "made", task="code", recipe=SHORT, report=_silent)
    prepare(tmp_path / "made", task="game", recipe=SHORT, report=_silent)
    assert "target" in json.loads((tmp_path / "made" / "train.jsonl").read_text().splitlines()[0])
    with pytest.raises(ConfigError, match="no quickstart task 'gaem'; did you mean 'game'"):
        prepare(tmp_path / "made", task="gaem", report=_silent)


@pytest.mark.parametrize(
    ("config", "task", "files"),
    [
        ("quickstart.yaml", "think", ("model", "train.jsonl", "heldout.jsonl")),
        ("tools.yaml", "tool", ("model", "train.jsonl", "heldout.jsonl")),
        ("environment.yaml", "game", ("model", "train.jsonl", "heldout.jsonl")),
        ("code.yaml", "code", ("model", "train.jsonl", "heldout.jsonl")),
        ("reasoning-gym.yaml", "reasoning_gym", ("model",)),
    ],
)
def test_the_default_folder_is_the_one_that_the_config_names(config: str, task: str, files: tuple[str, ...]) -> None:
    text = (Path(__file__).parents[2] / "configs" / config).read_text(encoding="utf-8")
    for file in files:
        assert f"path: {default_folder(0, task=task)}/{file}\n" in text
    command = "prepare-quickstart" if task == "think" else f"prepare-quickstart --task {task}"
    assert f"grpo-async {command} " in text


def test_the_first_200_held_out_rows_hold_many_answers(prepared: Path) -> None:
    """Evaluation takes the first N rows, so they must not be a corner of the task."""
    rows = [json.loads(line) for line in (prepared / "heldout.jsonl").read_text().splitlines()[:200]]
    answers = [row["answer"] for row in rows]
    assert max(answers.count(answer) for answer in answers) / 200 < 0.2
    assert len({row["prompt"][0]["content"][0] for row in rows}) == 5
