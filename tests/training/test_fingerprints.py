"""A checkpoint goes on with the content that it was trained with, wherever that is, and with no other."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from grpo_async.chat.renderer import load_renderer
from grpo_async.errors import ConfigError
from grpo_async.training.fingerprints import Fingerprints, check_fingerprints, run_fingerprints
from tests.support.configs import small_config


def _found(folder: Path, *, reference: str = "initial", **model: Any) -> Fingerprints:
    config = small_config(
        model={"path": str(folder), **model},
        loss={"beta": 0.1, "reference": reference},
        rewards=[{"model": str(folder.parent / "judge")}],
    )
    return run_fingerprints(config, load_renderer(config))


def _edit(file: Path, edit: Callable[[Any], None]) -> None:
    content = json.loads(file.read_text())
    edit(content)
    file.write_text(json.dumps(content))


def _swap_digits(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    one, two = (json.loads(text)["model"]["vocab"][digit] for digit in "12")
    text = text.replace(f'"1": {one}', f'"1": {two}').replace(f'"2": {two}', f'"2": {one}')
    (folder / "tokenizer.json").write_text(text)


def _change_a_weight(folder: Path, name: str = "model.layers.1.mlp.down_proj.weight") -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors[name][3, 3] += 1.0
    save_file(tensors, file, {"format": "pt"})


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    for name in ("base", "reference", "judge"):
        shutil.copytree(tiny_model, tmp_path / name)
    return tmp_path / "base"


def test_a_folder_that_moved_or_was_written_by_another_version_is_the_same(model: Path) -> None:
    saved = json.loads(json.dumps(_found(model)))  # as state.json has it
    moved = model.with_name("moved")
    model.rename(moved)
    _edit(moved / "config.json", lambda content: content.update(transformers_version="1.0"))
    tokenizer = load_renderer(small_config(model={"path": str(moved)})).tokenizer
    tokenizer("of a call", padding="max_length", truncation=True, max_length=8)
    tokenizer.save_pretrained(moved)
    template = moved.with_name("mine.jinja")
    template.write_text(tokenizer.chat_template)
    check_fingerprints(saved, _found(moved, chat_template=str(template)), step=3)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (_change_a_weight, ["model.path", "loss.reference"]),
        (lambda base: _edit(base / "config.json", lambda c: c.update(rms_norm_eps=0.1)), ["model.path"]),
        (_swap_digits, ["tokenizer"]),
        (lambda base: _edit(base / "tokenizer.json", lambda c: c["model"]["merges"].reverse()), ["tokenizer"]),
        (
            lambda base: _edit(base / "tokenizer_config.json", lambda c: c.update(eos_token="<|endoftext|>")),
            ["tokenizer"],
        ),
        (lambda base: _edit(base / "generation_config.json", lambda c: c.update(eos_token_id=[2, 5])), ["tokenizer"]),
        (
            lambda base: (base / "chat_template.jinja").write_text("{{ messages[0]['content'] }}"),
            ["chat template"],
        ),
        (lambda base: _change_a_weight(base.with_name("judge")), ["reward model"]),
    ],
)
def test_other_content_is_refused_by_the_name_of_what_changed(
    model: Path, changes: Callable[[Path], Any], named: list[str]
) -> None:
    saved = _found(model)
    changes(model)
    with pytest.raises(ConfigError) as caught:
        check_fingerprints(saved, _found(model), step=3)
    changed = [line.strip().partition(":")[0] for line in str(caught.value).splitlines()[1:-1]]
    assert set(named) <= {name.removesuffix(f" {model.parent}/judge") for name in changed}


def test_a_reference_of_other_content_is_refused_and_a_copy_of_the_base_is_not(model: Path) -> None:
    reference = model.with_name("reference")
    saved = _found(model)
    check_fingerprints(saved, _found(model, reference=str(reference)), step=3)
    _change_a_weight(reference, "model.embed_tokens.weight")
    with pytest.raises(ConfigError, match=r"loss\.reference: .*base .* -> .*reference "):
        check_fingerprints(saved, _found(model, reference=str(reference)), step=3)
