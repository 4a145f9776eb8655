"""Hugging Face folders: of the policy in memory and of a checkpoint, and the model card."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import yaml

from grpo_async.config import ExperimentConfig
from grpo_async.config.public import public_config
from grpo_async.errors import CheckpointError
from grpo_async.run_directory import RunDir
from grpo_async.training.export import export_model, model_card
from tests.support.configs import small_config
from tests.support.ranks import run_on_ranks
from tests.training.tiny_models import load_tiny

MODULE = "tests.support.checkpoint_jobs"


def _config(model: Path | str = "base/model") -> ExperimentConfig:
    return small_config(
        run={"name": "my-run"},
        model={"path": str(model)},
        rewards=[{"function": "mine:right", "weight": 2.0, "arguments": {"api_key": "sk-12345"}}],
        inference={"max_model_len": 1024},
    )


def _assert_holds(folder: Path, expected: dict[str, float]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    names = [name for name, _ in model.named_parameters()]
    assert sorted(names) == sorted(expected)
    for name, parameter in model.named_parameters():
        flat = parameter.detach().double().reshape(-1)
        value = float((flat * torch.linspace(1.0, 2.0, flat.numel())).sum())
        assert value == pytest.approx(expected[name], abs=1e-6), name


@pytest.mark.slow
def test_two_ranks_export_what_they_trained_and_their_checkpoint_becomes_the_same_folder(
    tiny_model: Path, tmp_path: Path
) -> None:
    from grpo_async.training.export import export_checkpoint

    run = tmp_path / "run"
    saved = run_on_ranks("save_and_export", 2, tmp_path / "job", module=MODULE, model=tiny_model, run=run)
    _assert_holds(run / "model", saved["saved"])
    folder = tmp_path / "out"
    config = _config(tiny_model)
    export_checkpoint(RunDir(run), 1, config, folder)
    _assert_holds(folder, saved["saved"])
    assert "trained for 1 of" in (folder / "README.md").read_text()
    (run / "checkpoints" / "step_1" / "state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"cannot be used: .*state\.json has 2 bytes"):
        export_checkpoint(RunDir(run), 1, config, folder)


def test_the_folder_is_what_was_served(tiny_model: Path, tmp_path: Path) -> None:
    """In the dtype of the server, and with the ends of the base, of the tokenizer and of the configuration. The base has settings
    of generation that transformers reads with a warning, such as Vicuna's, and itself refuses to save."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    base, tokenizer = Path(shutil.copytree(tiny_model, tmp_path / "base")), AutoTokenizer.from_pretrained(tiny_model)
    (base / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.6, "eos_token_id": [7]}))
    policy, ends = load_tiny(base), [tokenizer.convert_ids_to_tokens(9)]
    export_model(tmp_path / "model", policy, tokenizer, dtype="bfloat16", end_tokens=ends)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    for name, tensor in exported.named_parameters():
        assert tensor.dtype == torch.bfloat16
        assert torch.equal(tensor, policy.model.get_parameter(name).bfloat16())
    generation = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (generation.temperature, generation.top_p, generation.do_sample) == (0.9, 0.6, None)
    assert set(generation.eos_token_id) == {7, 9, tokenizer.eos_token_id}


def test_the_card_states_the_run() -> None:
    config = _config()
    card = model_card(config, step=7, evaluation={"pass@1": 0.25, "reward": 0.5})
    assert "| pass@1 | 0.25 |" in card
    resolved = yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])
    assert resolved == public_config(config)  # no servers, no values of arguments
    assert "sk-12345" not in card
