"""Estimates of memory: parameter counts of real files, the formula worked out by hand, and what becomes of a shared GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from grpo_async.checks.memory import estimate_trainer, shared_gpu_fraction
from grpo_async.checks.model_files import count_parameters
from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from tests.launcher.support import make_config
from tests.support.tiny_model import build_tiny_model

GIB = 1 << 30
NUMBER = 596_049_920  # Qwen3-0.6B


def _config(folder: Path, **sections: Any) -> ExperimentConfig:
    base: dict[str, Any] = {
        "model": {"compute_dtype": "bfloat16"},
        "inference": {"engine": "vllm", "dtype": "bfloat16", "max_model_len": 2048},
        "training": {"micro_batch_tokens": 4096, "logprob_chunk_tokens": 1024},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    config = make_config(folder, **base)
    shape = {"hidden_size": 1024, "num_hidden_layers": 28, "vocab_size": 151_936}
    (Path(config.model.path) / "config.json").write_text(json.dumps(shape))
    return config


def _parameters(folder: Path) -> int:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_count_is_that_of_the_loaded_model(tmp_path: Path, is_tied: bool) -> None:
    folder = build_tiny_model(tmp_path / "model", tie_word_embeddings=is_tied)
    assert count_parameters(str(folder)) == _parameters(folder)


def test_a_tied_head_that_the_file_holds_too_counts_once(tmp_path: Path) -> None:
    embedding = torch.zeros(10, 4)
    tensors = {
        "model.embed_tokens.weight": embedding,
        "lm_head.weight": embedding.clone(),
        "model.norm.weight": torch.zeros(4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": True}))
    assert count_parameters(str(tmp_path)) == 44
    (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": False}))
    assert count_parameters(str(tmp_path)) == 84


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{}", b"\xff" * 16, (5).to_bytes(8, "little") + b"[1,2]"])
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model.path: .*model\.safetensors is no whole safetensors file"):
        count_parameters(str(tmp_path))


def test_the_trainer_of_one_rank_is_what_the_formula_says(tmp_path: Path) -> None:
    estimate = estimate_trainer(_config(tmp_path), NUMBER)
    # float32: 4 N; gathered in bfloat16: the embedding and two of 28 layers
    assert estimate.weights == 4 * NUMBER + 2 * (1024 * 151_936 + NUMBER // 14)
    assert (estimate.gradients, estimate.optimizer) == (4 * NUMBER, 12 * NUMBER)
    assert estimate.activations == 4096 * 1024 * 2 * 36 * 28 + 1024 * 151_936 * 4 * 5
    assert estimate.total == estimate.weights + estimate.gradients + estimate.optimizer + estimate.activations


def test_vllm_gets_what_the_trainer_leaves_rounded_down(tmp_path: Path) -> None:
    config = _config(tmp_path)
    trainer = estimate_trainer(config, NUMBER).total
    for gib in (48, 80, 141):  # rounding up would take more than is left, in some of them
        left = gib * GIB - 1.15 * trainer - 2 * GIB - 2 * NUMBER
        fraction, advice = shared_gpu_fraction(config, NUMBER, gib * GIB)
        assert advice is None
        assert 0 <= left - fraction * gib * GIB < 0.01 * gib * GIB
        assert 0.2 < fraction < 0.9
    assert shared_gpu_fraction(config, NUMBER, 10_000 * GIB)[0] == 0.9  # never all of it


def test_a_sleeping_server_leaves_the_trainer_its_memory_so_it_may_take_more(tmp_path: Path) -> None:
    awake, _ = shared_gpu_fraction(_config(tmp_path), NUMBER, 40 * GIB)
    (tmp_path / "other").mkdir()
    sleeps = _config(
        tmp_path / "other",
        inference={"vllm": {"sleep_while_training": True}},
        rollout={"max_staleness": 0, "max_completion_tokens": 8},
    )
    assert shared_gpu_fraction(sleeps, NUMBER, 40 * GIB)[0] > awake + 0.1


def test_a_gpu_that_seems_too_small_gives_the_server_what_it_needs_and_a_warning(tmp_path: Path) -> None:
    fraction, advice = shared_gpu_fraction(_config(tmp_path), NUMBER, 16 * GIB)
    # served weights, vLLM's own work, keys and values of one sequence
    needed = 2 * NUMBER + 3 * GIB // 2 + 2 * 28 * 1024 * 2 * 2048
    assert 0 <= fraction * 16 * GIB - needed < 0.01 * 16 * GIB
    assert advice is not None
    assert "model.activation_checkpointing" in advice
