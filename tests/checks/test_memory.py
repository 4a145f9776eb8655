"""Estimates of memory: parameter counts of real files, formulas worked out by hand, activations against what PyTorch saves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from grpo_async.checks.memory import (
    MemoryEstimate,
    ModelShape,
    activation_bytes,
    count_parameters,
    estimate_server,
    estimate_trainer,
    format_bytes,
    guess_shape,
    read_shape,
    shared_gpu_fraction,
)
from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError
from grpo_async.training.attention import SampleLayout, use_attention
from tests.launcher.support import make_config
from tests.support.tiny_model import build_tiny_model

GIB = 1 << 30
# Qwen3-0.6B
SHAPE = ModelShape(
    num_layers=28, hidden_size=1024, intermediate_size=3072, num_heads=16, num_kv_heads=8, head_dim=128,
    vocab_size=151_936, is_tied=True,
)  # fmt: skip
NUMBER = 596_049_920


def _config(folder: Path, **sections: Any) -> ExperimentConfig:
    base: dict[str, Any] = {
        "model": {"compute_dtype": "bfloat16"},
        "inference": {"engine": "vllm", "dtype": "bfloat16", "max_model_len": 2048},
        "training": {"micro_batch_tokens": 4096, "logprob_chunk_tokens": 1024},
    }
    for name, values in sections.items():
        base[name] = {**base.get(name, {}), **values}
    return make_config(folder, **base)


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


def test_files_of_an_index_are_added_up_and_others_are_left_out(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(3, 5), "counter": torch.zeros(7, dtype=torch.int64)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros(2, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    save_file({"z": torch.zeros(1000)}, tmp_path / "other.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert count_parameters(str(tmp_path)) == 17  # 15 + 2; whole numbers are no parameters


def test_what_is_no_folder_or_has_other_files_is_unknown(tmp_path: Path) -> None:
    assert count_parameters("Qwen/Qwen3-0.6B") is None
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert count_parameters(str(tmp_path)) is None


@pytest.mark.parametrize("content", [b"", b"\x10\0\0\0\0\0\0\0{}", b"\xff" * 16, (5).to_bytes(8, "little") + b"[1,2]"])
def test_a_broken_file_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model.path: .*model\.safetensors is no whole safetensors file"):
        count_parameters(str(tmp_path))


def test_a_missing_file_of_the_index_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": "gone.safetensors"}}')
    with pytest.raises(ConfigError, match=r"gone\.safetensors"):
        count_parameters(str(tmp_path))


def test_the_shape_is_that_of_config_json(tiny_model: Path, tmp_path: Path) -> None:
    shape = read_shape(str(tiny_model))
    assert shape is not None
    assert (shape.num_layers, shape.hidden_size, shape.head_dim, shape.num_kv_heads, shape.is_tied) == (
        2,
        64,
        32,
        1,
        True,
    )
    assert read_shape(str(tmp_path)) is None
    assert read_shape("Qwen/Qwen3-0.6B") is None


def test_a_guessed_shape_has_about_the_parameters_it_was_guessed_from() -> None:
    for number in (600e6, 8e9, 70e9):
        shape = guess_shape(int(number))
        assert 12 * shape.num_layers * shape.hidden_size**2 == pytest.approx(number, rel=0.1)
    assert guess_shape(1000).num_layers >= 1


def test_the_trainer_of_one_rank_is_what_the_formula_says(tmp_path: Path) -> None:
    estimate = estimate_trainer(_config(tmp_path), NUMBER, SHAPE)
    # float32: 4 N; gathered in bfloat16: the embedding and two layers of (N - embedding) / 28
    layer = (NUMBER - 151_936 * 1024) // 28
    assert estimate.weights == 4 * NUMBER + 2 * (151_936 * 1024 + 2 * layer)
    assert (
        estimate.gradients == 4 * NUMBER + 2 * 151_936 * 1024
    )  # the shard, and the embedding's before it is scattered
    assert estimate_trainer(_config(tmp_path), NUMBER, SHAPE, on_gpu=False).gradients == 4 * NUMBER
    assert estimate.optimizer == 12 * NUMBER
    # 2 bytes x (8 x 1024 + 8 x 2048 + 3 x 1024 + 4 x 3072) = 79,872 a token and layer
    assert estimate.activations == 4096 * 28 * 79_872
    assert estimate.logits == 1024 * 151_936 * 4 * 5
    assert estimate.staging == 2 * 2 * 151_936 * 1024 + 4 * 151_936 * 1024  # the embedding is larger than 8 MiB
    assert estimate.total == estimate.weights + estimate.optimizer + max(
        estimate.gradients + estimate.activations + estimate.logits, estimate.staging
    )


def test_a_push_counts_where_it_needs_more_than_a_step() -> None:
    assert MemoryEstimate(weights=1, gradients=2, activations=3, logits=4, staging=5).total == 1 + 9
    assert MemoryEstimate(weights=1, gradients=2, staging=50, kv_cache=7).total == 1 + 50 + 7


def test_ranks_share_weights_moments_and_gradients_and_not_the_rest(tmp_path: Path) -> None:
    one = estimate_trainer(_config(tmp_path), NUMBER, SHAPE)
    four = estimate_trainer(_config(tmp_path, launch={"num_trainer_ranks": 4}), NUMBER, SHAPE)
    assert one.optimizer == pytest.approx(4 * four.optimizer)
    assert one.weights - four.weights == 3 * NUMBER  # 4 N - 4 N / 4
    assert one.gradients - four.gradients == 3 * NUMBER  # they are scattered after each micro-batch
    assert (one.activations, one.logits) == (four.activations, four.logits)
    on_cpu = [
        estimate_trainer(_config(tmp_path, launch={"num_trainer_ranks": ranks}), NUMBER, SHAPE, on_gpu=False).gradients
        for ranks in (1, 4)
    ]
    assert on_cpu == [4 * NUMBER] * 2  # there they travel once, after the last one


def test_32_billion_parameters_on_16_gpus_of_80_gib_fit(tmp_path: Path) -> None:
    """Qwen3-32B; whole gradients on each rank would be 122 GiB that do not exist."""
    shape = ModelShape(
        num_layers=64, hidden_size=5120, intermediate_size=25_600, num_heads=64, num_kv_heads=8, head_dim=128,
        vocab_size=151_936, is_tied=False,
    )  # fmt: skip
    config = _config(tmp_path, launch={"num_trainer_ranks": 16}, model={"activation_checkpointing": "full"})
    assert estimate_trainer(config, 32_762_123_264, shape).total < 80 * GIB


def test_checkpointing_leaves_one_vector_per_layer_and_one_whole_layer(tmp_path: Path) -> None:
    estimate = estimate_trainer(_config(tmp_path, model={"activation_checkpointing": "full"}), NUMBER, SHAPE)
    assert estimate.activations == 4096 * (28 * 1024 * 2 + 79_872)


def test_a_bucket_larger_than_every_parameter_is_what_is_staged(tmp_path: Path) -> None:
    estimate = estimate_trainer(_config(tmp_path, weights={"bucket_mb": 1024}), NUMBER, SHAPE)
    assert estimate.staging == 2 * GIB + 4 * 151_936 * 1024


def test_a_server_holds_the_weights_twice_and_its_cache(tmp_path: Path) -> None:
    config = _config(tmp_path, inference={"vllm": {"kv_cache_mb": 512}, "embedded": {"max_slots": 4}})
    kv_of_a_token = 2 * 28 * 8 * 128 * 2
    on_cpu = estimate_server(config, NUMBER, SHAPE)
    assert (on_cpu.weights, on_cpu.staging, on_cpu.kv_cache) == (2 * NUMBER, 2 * NUMBER, 512 << 20)
    assert estimate_server(config, NUMBER, SHAPE, on_gpu=True).kv_cache == 2048 * kv_of_a_token
    assert estimate_server(config, NUMBER, SHAPE, engine="embedded").kv_cache == 4 * 2048 * kv_of_a_token
    parallel = _config(tmp_path, inference={"vllm": {"tensor_parallel_size": 2}})
    assert estimate_server(parallel, NUMBER, SHAPE).weights == NUMBER


def test_vllm_gets_what_the_trainer_leaves_rounded_down(tmp_path: Path) -> None:
    config = _config(tmp_path)
    trainer = estimate_trainer(config, NUMBER, SHAPE).total
    for gib in (48, 80, 81, 96, 141):  # rounding up would take more than is left, in some of them
        left = gib * GIB - 1.15 * trainer - 2 * GIB - 2 * NUMBER
        fraction, advice = shared_gpu_fraction(config, NUMBER, gib * GIB, SHAPE)
        assert advice is None
        assert 0 <= left - fraction * gib * GIB < 0.01 * gib * GIB
        assert 0.2 < fraction < 0.9
    assert shared_gpu_fraction(config, NUMBER, 10_000 * GIB, SHAPE)[0] == 0.9  # never all of it


def test_a_sleeping_server_leaves_the_trainer_its_memory_so_it_may_take_more(tmp_path: Path) -> None:
    sleeps = _config(
        tmp_path,
        inference={"vllm": {"sleep_while_training": True}},
        rollout={"max_staleness": 0, "max_completion_tokens": 8},
    )
    awake, _ = shared_gpu_fraction(_config(tmp_path), NUMBER, 40 * GIB, SHAPE)
    assert shared_gpu_fraction(sleeps, NUMBER, 40 * GIB, SHAPE)[0] > awake + 0.1


def test_a_gpu_that_seems_too_small_gives_the_server_what_it_needs_and_a_warning(tmp_path: Path) -> None:
    config = _config(tmp_path)
    trainer, server = estimate_trainer(config, NUMBER, SHAPE), estimate_server(config, NUMBER, SHAPE, on_gpu=True)
    needed = server.weights + server.kv_cache + 3 * GIB // 2  # vLLM's own work
    just_enough = int(1.15 * trainer.total + 2 * GIB + server.staging + 1.05 * needed)
    assert shared_gpu_fraction(config, NUMBER, just_enough, SHAPE)[1] is None
    for gpu_bytes in (just_enough - 3 * GIB, 16 * GIB):
        fraction, advice = shared_gpu_fraction(config, NUMBER, gpu_bytes, SHAPE)
        assert 0 <= fraction * gpu_bytes - needed < 0.01 * gpu_bytes
        assert advice is not None
        assert "model.activation_checkpointing" in advice


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sizes", [{}, {"intermediate_size": 1024}, {"num_attention_heads": 8}, {"num_key_value_heads": 2}]
)
def test_activations_are_what_pytorch_saves_for_the_backward_pass(dtype: torch.dtype, sizes: dict[str, int]) -> None:
    """Within 2 % in bfloat16; float32 casts nothing and keeps up to a fifth less."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    segment_ids = torch.tensor([[0] * 64 + [1] * 40 + [2] * 24])  # three samples in a row
    position_ids = torch.cat([torch.arange(length) for length in (64, 40, 24)])[None]
    fields: dict[str, Any] = {
        "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64,
        "vocab_size": 300, "attn_implementation": "sdpa", **sizes,
    }  # fmt: skip
    saved_bytes = []
    for num_layers in (1, 2):  # the difference is one layer
        config = Qwen3Config(num_hidden_layers=num_layers, **fields)
        model = AutoModelForCausalLM.from_config(config).to(dtype)
        use_attention(model, "mask")
        layout = SampleLayout(segment_ids)
        weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        saved: dict[int, torch.UntypedStorage] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            saved[storage.data_ptr()] = storage  # noqa: B023 - used within the same turn of the loop
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model.base_model(
                input_ids=torch.zeros_like(segment_ids), attention_mask=layout.no_padding, position_ids=position_ids,
                use_cache=False, sample_layout=layout,
            )  # fmt: skip
        saved_bytes.append(sum(storage.nbytes() for pointer, storage in saved.items() if pointer not in weights))
    seen = (saved_bytes[1] - saved_bytes[0]) / segment_ids.numel()
    shape = ModelShape(
        num_layers=1, hidden_size=256, intermediate_size=fields["intermediate_size"], num_heads=fields["num_attention_heads"],
        num_kv_heads=fields["num_key_value_heads"], head_dim=64, vocab_size=300, is_tied=False,
    )  # fmt: skip
    formula = activation_bytes(shape, item_bytes=dtype.itemsize)
    assert seen <= formula * 1.02
    assert seen >= formula * (0.98 if dtype is torch.bfloat16 else 0.75)


def test_bytes_read_well() -> None:
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 << 20, 5 * GIB, 2 << 40)] == [
        "0 B", "1023 B", "1.5 KiB", "3.0 MiB", "5.0 GiB", "2.0 TiB",
    ]  # fmt: skip
    words = MemoryEstimate(weights=2 * GIB, kv_cache=GIB).describe()
    assert words == "weights 2.0 GiB, kv cache 1.0 GiB (3.0 GiB at once)"


def _trainer(folder: Path, **sections: Any) -> MemoryEstimate:
    return estimate_trainer(_config(folder, **sections), NUMBER, SHAPE)


def test_adapters_need_gradients_and_moments_of_their_own_only(tmp_path: Path) -> None:
    plain, lora = _trainer(tmp_path), _trainer(tmp_path, model={"lora": {"rank": 16}})
    # q 3072, k and v 2048 each, o 3072, gate, up, down 4096 each: 22,528 x 16 x 28
    adapters = 10_092_544
    assert (lora.gradients, lora.optimizer) == (6 * adapters, 12 * adapters)
    assert lora.weights == plain.weights + 4 * adapters
    only_q = _trainer(tmp_path, model={"lora": {"rank": 16, "target_modules": ["q_proj"]}})
    assert only_q.gradients == 6 * 1_376_256
    packed = _trainer(tmp_path, model={"lora": {"rank": 16, "quantization": "nf4"}})
    layers = NUMBER - 151_936 * 1024
    assert lora.weights - packed.weights > 3.4 * layers  # 4 bytes become 0.5625
    assert packed.gradients == lora.gradients


def test_a_second_model_as_reference_counts_and_the_policy_without_adapters_does_not(tmp_path: Path) -> None:
    assert _trainer(tmp_path).reference == 0
    assert _trainer(tmp_path, loss={"type": "dapo", "beta": 0.1}).reference == 2 * NUMBER  # bfloat16
    assert _trainer(tmp_path, loss={"type": "dapo", "beta": 0.1}, model={"lora": {}}).reference == 0
    other = _trainer(tmp_path, loss={"type": "dapo", "beta": 0.1, "reference": "/a/folder"}, model={"lora": {}})
    assert other.reference == 2 * NUMBER
    assert other.total - _trainer(tmp_path, model={"lora": {}}).total == 2 * NUMBER
    assert "reference 1.1 GiB" in other.describe()


def test_optimizers_differ_in_their_state(tmp_path: Path) -> None:
    adamw, eight, muon = (
        _trainer(tmp_path, optimizer={"type": kind}).optimizer for kind in ("adamw", "adamw_8bit", "muon")
    )
    assert (adamw, eight, muon) == (12 * NUMBER, int(2.1 * NUMBER), 8 * NUMBER)


def test_offloaded_shards_are_not_on_the_device(tmp_path: Path) -> None:
    plain, offloaded = _trainer(tmp_path), _trainer(tmp_path, training={"cpu_offload": True})
    assert (offloaded.optimizer, plain.weights - offloaded.weights) == (0, 4 * NUMBER)


def test_hybrid_sharding_divides_by_the_ranks_of_a_machine(tmp_path: Path) -> None:
    nodes = {"nodes": 2, "rdzv": "somewhere:29400", "num_trainer_ranks": 4}
    full, hybrid = (_trainer(tmp_path, launch={**nodes, "sharding": kind}) for kind in ("full", "hybrid"))
    assert (full.optimizer, hybrid.optimizer) == (12 * NUMBER // 8, 12 * NUMBER // 4)


def test_selective_checkpointing_lies_between_none_and_full(tmp_path: Path) -> None:
    none, selective, full = (
        _trainer(tmp_path, model={"activation_checkpointing": mode}).activations
        for mode in ("none", "selective", "full")
    )
    assert full < selective < none


def test_layers_that_stay_gathered_are_all_counted(tmp_path: Path) -> None:
    plain, kept = _trainer(tmp_path), _trainer(tmp_path, training={"reshard_after_forward": False})
    layer = (NUMBER - 151_936 * 1024) // 28
    assert kept.weights - plain.weights == 26 * layer * 2
