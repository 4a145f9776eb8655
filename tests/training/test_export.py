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


def _config(model: Path | str = "base/model", *, lora: dict[str, int] | None = None) -> ExperimentConfig:
    return small_config(
        run={"name": "my-run"},
        model={"path": str(model), "lora": lora},
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


def test_the_files_are_in_the_dtype_in_which_the_model_is_served(tiny_model: Path, tmp_path: Path) -> None:
    """Masters in float32 would be twice the bytes of what anybody serves."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy = load_tiny(tiny_model)
    export_model(tmp_path / "model", policy, AutoTokenizer.from_pretrained(tiny_model), dtype="bfloat16")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype="auto")
    assert {parameter.dtype for parameter in exported.parameters()} == {torch.bfloat16}
    for name, tensor in exported.named_parameters():
        assert torch.equal(tensor, policy.model.get_parameter(name).bfloat16())


def test_a_generation_config_that_transformers_reads_with_a_warning_is_exported_as_it_is(
    tiny_model: Path, tmp_path: Path
) -> None:
    """Such as Vicuna's: transformers itself refuses to save it, which would end a run after its last step."""
    from transformers import AutoTokenizer, GenerationConfig

    base = Path(shutil.copytree(tiny_model, tmp_path / "base"))
    (base / "generation_config.json").write_text(json.dumps({"temperature": 0.9, "top_p": 0.6}))
    export_model(tmp_path / "model", load_tiny(base), AutoTokenizer.from_pretrained(base), dtype="float32")
    exported = GenerationConfig.from_pretrained(tmp_path / "model")
    assert (exported.temperature, exported.top_p, exported.do_sample) == (0.9, 0.6, None)


def test_the_exported_model_ends_its_turns_where_the_rollouts_ended(tiny_model: Path, tmp_path: Path) -> None:
    """At the ends of the base, at the tokenizer's, and at those of the configuration."""
    from transformers import AutoTokenizer, GenerationConfig

    base, tokenizer = Path(shutil.copytree(tiny_model, tmp_path / "base")), AutoTokenizer.from_pretrained(tiny_model)
    (base / "generation_config.json").write_text(json.dumps({"eos_token_id": [7]}))
    export_model(
        tmp_path / "model", load_tiny(base), tokenizer, dtype="float32", end_tokens=[tokenizer.convert_ids_to_tokens(9)]
    )
    exported = GenerationConfig.from_pretrained(tmp_path / "model")
    assert set(exported.eos_token_id) == {7, 9, tokenizer.eos_token_id}


def test_the_card_states_the_run() -> None:
    config = _config()
    card = model_card(config, step=7, evaluation={"pass@1": 0.25, "reward": 0.5})
    front, _, text = card.removeprefix("---\n").partition("---\n")
    assert yaml.safe_load(front)["base_model"] == "base/model"
    assert "| pass@1 | 0.25 |" in text
    resolved = yaml.safe_load(text.partition("```yaml\n")[2].partition("```")[0])
    assert resolved == public_config(config)  # no servers, no values of arguments
    assert "sk-12345" not in card
    # of an export, or on a hub, no adapter lies beside it
    assert "merged into these weights" in model_card(_config(lora={"rank": 4}), step=1)
