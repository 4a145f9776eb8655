"""prepare(): once, whole, reproducible, and never over somebody else's files. A warmup of two steps replaces the real one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_async.config.sections import JsonlSource
from grpo_async.data import load_rows
from grpo_async.errors import ConfigError
from grpo_async.quickstart import CONFIGS
from grpo_async.quickstart.model import MAX_VOCABULARY
from grpo_async.quickstart.prepare import default_folder, prepare
from grpo_async.quickstart.tasks import TASKS, WarmupRecipe


@pytest.fixture(scope="module", autouse=True)
def _short_warmup() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, task in TASKS.items():
            patch.setitem(TASKS, name, replace(task, recipe=WarmupRecipe(num_steps=2, batch_size=4)))
        yield


FOLDER = Path(".cache/quickstart")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quickstart")
    prepare(root)
    return root / FOLDER / "seed_0"


def _content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_the_folder_holds_a_loadable_model_and_rows_and_a_second_call_touches_nothing(
    prepared: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(prepared / "model")
    tokenizer = AutoTokenizer.from_pretrained(prepared / "model")
    assert model.config.vocab_size == len(tokenizer)
    assert model.config.head_dim == 32  # vLLM's CPU attention refuses 24, which 96 / 4 would give
    assert tokenizer.eos_token_id == model.generation_config.eos_token_id
    assert [path.name for path in prepared.parent.iterdir()] == [prepared.name]
    before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
    capsys.readouterr()
    prepare(prepared.parents[2])
    assert capsys.readouterr().out == ""
    assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_weights(prepared: Path, tmp_path: Path) -> None:
    import torch

    torch.manual_seed(99)  # what the caller drew before must not matter
    prepare(tmp_path)
    assert _content(tmp_path / FOLDER / "seed_0") == _content(prepared)
    prepare(tmp_path, seed=1)
    other, first = _content(tmp_path / FOLDER / "seed_1"), _content(prepared)
    differing = {"prepared.json", "train.jsonl", "heldout.jsonl", "model/model.safetensors"}
    assert {name for name in first if first[name] != other[name]} == differing


def test_files_of_others_are_never_replaced(tmp_path: Path) -> None:
    thesis = tmp_path / FOLDER / "seed_0" / "thesis.txt"
    thesis.parent.mkdir(parents=True)
    thesis.write_text("mine")
    with pytest.raises(ConfigError, match="did not make"):
        prepare(tmp_path)
    assert thesis.read_text() == "mine"


@pytest.mark.parametrize("task", ["think", "tool"])
def test_every_task_makes_what_its_configs_name(task: str, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    prepare(tmp_path, task=task)
    folder = tmp_path / default_folder(task=task)
    train, held_out = (load_rows(JsonlSource(path=folder / f"{name}.jsonl")) for name in ("train", "heldout"))
    assert len(train) > len(held_out) >= 20
    assert set(train[0]) == set(held_out[0]) == {"prompt", "answer"}
    assert len(AutoTokenizer.from_pretrained(folder / "model")) <= MAX_VOCABULARY
    configs = Path(__file__).parents[2] / "configs"
    text = (configs / CONFIGS[task]).read_text(encoding="utf-8")
    for file in ("model", "train.jsonl", "heldout.jsonl"):
        assert f"path: {default_folder(0, task=task)}/{file}\n" in text
