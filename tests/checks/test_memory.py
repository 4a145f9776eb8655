"""Estimates of memory: parameter counts of real files, and the formulas worked out by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks._models import ModelShape
from grpo_async.checks.memory import ModelSize, bytes_beside_vllm, server_memory, trainer_memory
from grpo_async.checks.model_files import count_parameters
from grpo_async.config import ExperimentConfig
from tests.launch.support import make_config
from tests.support.configs import merged
from tests.support.tiny_model import build_tiny_model

GIB = 1 << 30
N = 596_049_920
SIZE = ModelSize.of(
    {"hidden_size": 1024, "num_hidden_layers": 28, "vocab_size": 151_936, "num_attention_heads": 16,
     "num_key_value_heads": 8, "head_dim": 128}, N,
)  # fmt: skip
"""Qwen3-0.6B."""


def _config(folder: Path, **sections: Any) -> ExperimentConfig:
    base: dict[str, Any] = {
        "model": {"compute_dtype": "bfloat16"},
        "inference": {"engine": "vllm", "dtype": "bfloat16", "max_model_len": 2048},
        "training": {"micro_batch_tokens": 4096, "logprob_chunk_tokens": 1024},
    }
    return make_config(folder, **merged(base, sections))


def test_what_a_token_computes_of_a_dense_model_and_of_one_with_experts() -> None:
    """Layers of 2 x 4 x 2 x (2 + 1) in attention and 3 x 4 x 8 in the MLP, with an embedding of 10 x 4. Experts: Qwen3-30B-A3B, of
    whose 3.35 billion active parameters 0.31 are the embedding."""
    dense: dict[str, Any] = {
        "hidden_size": 4, "num_hidden_layers": 2, "vocab_size": 10, "num_attention_heads": 2, "num_key_value_heads": 1,
        "head_dim": 2, "tie_word_embeddings": True,
    }  # fmt: skip
    small = ModelSize.of(dense, 328)
    assert small == ModelShape(vocab=10, hidden=4, layers=2, heads=2, kv_heads=1, head_dim=2, intermediate=8).size
    assert (small.served, small.computed) == (328, 328)
    assert small.forward_flops(3) == 2 * 328 + 4 * 2 * (2 * 2) * 3
    assert small.training_flops(5) == 3 * small.forward_flops(3)
    sparse = {
        "hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151_936, "num_attention_heads": 32, "head_dim": 128,
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "intermediate_size": 6144,
    }  # fmt: skip
    size = ModelSize.of(sparse, 30_532_122_624)
    assert size.computed == pytest.approx(3.35e9 - 0.31e9, rel=0.01)
    assert size.served == pytest.approx(30.53e9 - 0.31e9, rel=0.01)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_count_is_that_of_the_loaded_model(tmp_path: Path, is_tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    folder = build_tiny_model(tmp_path / "model", tie_word_embeddings=is_tied)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert count_parameters(str(folder)) == sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.slow
def test_the_estimate_of_a_trainer_is_what_fsdp_takes_on_ranks_that_do_not_exist(tmp_path: Path) -> None:
    """The peak is, one after the other: all activations; those of a layer, and the logits; the reduced gradient of the head."""
    names = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "tie_word_embeddings")
    orders, estimates = [], []
    for shape, ranks, tokens, checkpointing in (
        ((1024, 2, 3072, 32_000, True), 4, 6144, "none"),
        ((2048, 3, 6144, 32_000, False), 2, 4096, "full"),
        ((1024, 2, 3072, 100_000, False), 8, 512, "full"),
    ):
        hidden, layers, inner, vocabulary, is_tied = shape
        sizes = dict(zip(names, shape, strict=True))
        sizes |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": hidden // 16}
        orders.append({"ranks": ranks, "tokens": tokens, "checkpointing": checkpointing, **sizes})
        sections: dict[str, Any] = {
            "model": {"activation_checkpointing": checkpointing},
            "training": {"micro_batch_tokens": tokens},
            "launch": {"num_trainer_ranks": ranks},
            "rollout": {"max_completion_tokens": 16},
            "inference": {"max_model_len": 256},
        }
        parameters = layers * hidden * (3 * hidden + 3 * inner) + vocabulary * hidden * (1 if is_tied else 2)
        parts = trainer_memory(_config(tmp_path, **sections), ModelSize.of(sizes, parameters))
        estimates.append(sum(parts.values()) - parts["optimizer"])
    command = [sys.executable, "-m", "tests.checks.fake_ranks", json.dumps(orders)]
    peaks = json.loads(subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout)
    fractions = [peak / estimate for peak, estimate in zip(peaks, estimates, strict=True)]
    assert all(0.75 < fraction < 1.05 for fraction in fractions), fractions


def test_a_trainer_rank_takes_its_share_of_what_is_sharded_and_all_of_its_own_tokens(tmp_path: Path) -> None:
    one = trainer_memory(_config(tmp_path), SIZE)
    assert (one["weights"], one["gradients"], one["optimizer"]) == (4 * N, 4 * N, 8 * N)
    small = trainer_memory(_config(tmp_path, optimizer={"type": "adamw_8bit"}), SIZE)
    assert small["optimizer"] == pytest.approx(2.03 * N, rel=0.01)
    eight = trainer_memory(_config(tmp_path, launch={"num_trainer_ranks": 8}), SIZE)
    for name in ("weights", "gradients", "optimizer"):
        assert eight[name] == one[name] / 8
    for name in ("gathered", "activations", "logits"):
        assert eight[name] == one[name]
    adapters = trainer_memory(_config(tmp_path, model={"lora": {"rank": 16}}), SIZE)
    assert (adapters["gradients"], adapters["optimizer"]) == (4 * (N // 64), 8 * (N // 64))  # 16 of 1024 columns
    four: dict[str, Any] = {"launch": {"num_trainer_ranks": 2}, "model": {"lora": {"load_in_4bit": True}}}
    embedding = 1024 * 151_936
    assert trainer_memory(_config(tmp_path, **four), SIZE)["weights"] == 2 * embedding + 9 / 16 * (N - embedding)
    offloaded = trainer_memory(_config(tmp_path, launch={"device": "cuda"}, training={"cpu_offload": True}), SIZE)
    assert offloaded["weights"] == offloaded["gradients"] == offloaded["optimizer"] == 0


def test_a_server_takes_its_share_of_the_weights_and_of_the_cache(tmp_path: Path) -> None:
    two = server_memory(_config(tmp_path, inference={"vllm": {"tensor_parallel_size": 2}}), SIZE, 10)
    # 10 tokens x 28 layers x 2 x 8 heads x 128 x 2 bytes / 2
    assert two == {
        "weights": N, "adapters": 0, "activations and graphs": 1.5 * GIB, "experts of a push": 0,
        "KV cache": 10 * 28 * 2 * 8 * 128,
    }  # fmt: skip


def test_a_push_takes_a_layer_of_the_experts_that_a_worker_has(tmp_path: Path) -> None:
    mixture = replace(SIZE, routed=1)
    for vllm, workers in (({}, 1), ({"expert_parallel": True, "tensor_parallel_size": 2, "data_parallel_size": 2}, 4)):
        config = _config(tmp_path, inference={"vllm": vllm})
        assert server_memory(config, mixture, 0)["experts of a push"] == 2 * N / 28 / workers
    for key, number, has_experts in (("n_routed_experts", 8, True), ("num_local_experts", 0, False)):
        assert bool(ModelSize.of({key: number}, N).routed) is has_experts


def test_beside_a_server_that_sleeps_in_steps_only_weights_and_optimizer_stay_and_buckets_have_room(
    tmp_path: Path,
) -> None:
    parts = trainer_memory(_config(tmp_path), SIZE)
    bucket = 151_936 * 1024 * 2  # the embedding, more than a 64th of the weights
    assert bytes_beside_vllm(_config(tmp_path), SIZE) == 2 * GIB + 1.15 * sum(parts.values()) + 2 * bucket
    (tmp_path / "other").mkdir()
    sleeping: dict[str, Any] = {"rollout": {"max_staleness": 0}, "inference": {"vllm": {"sleep_while_training": True}}}
    beside = bytes_beside_vllm(_config(tmp_path / "other", **sleeping), SIZE)
    assert beside == 2 * GIB + 1.15 * (parts["weights"] + parts["optimizer"]) + 4 * bucket
    one_gib: dict[str, Any] = {**sleeping, "weights": {"bucket_mb": 1024}}
    assert bytes_beside_vllm(_config(tmp_path / "other", **one_gib), SIZE) == beside + 4 * (GIB - bucket)
