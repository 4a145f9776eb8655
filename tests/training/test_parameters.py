"""What is sent of a model equals what its checkpoint holds: names, shapes, values, order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.errors import ConfigError
from grpo_async.training.parameters import ShardedParameters
from tests.support.ranks import run_on_ranks
from tests.training.parameter_models import build, collect, with_adapters


def _saved(model: Any, folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    model.save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def _equal(
    sent: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], *, rtol: float = 0.0, atol: float = 0.0
) -> None:
    assert sorted(sent) == sorted(expected)
    for name, tensor in expected.items():
        assert sent[name].shape == tensor.shape, name
        torch.testing.assert_close(sent[name], tensor, rtol=rtol, atol=atol)


@pytest.mark.parametrize("kind", ["dense", "untied", "moe"])
def test_names_and_values_are_those_of_the_checkpoint(kind: str, tmp_path: Path) -> None:
    model = build(kind)
    sent = collect(ShardedParameters(model, wire_dtype=torch.float32))
    _equal(sent, _saved(model, tmp_path))
    assert ("lm_head.weight" in sent) == (kind != "dense")  # a tied head is sent once, as the embeddings


def test_experts_that_are_fused_in_memory_are_sent_one_by_one_also_after_loading(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    saved = _saved(build("moe"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    parameters = ShardedParameters(model, wire_dtype=torch.float32)
    _equal(collect(parameters), saved)
    # 4 experts x 3 matrices x 2 layers in 2 x 2 fused tensors
    experts = [spec for spec in parameters.specs if ".experts." in spec.name]
    assert [spec.shape for spec in experts[:2]] == [(8, 16), (8, 16)]
    assert len(experts) == 24


def test_buckets_follow_the_specs_and_their_size() -> None:
    parameters = ShardedParameters(build("moe"), wire_dtype=torch.bfloat16)
    specs = iter(parameters.specs)
    for bucket in parameters.buckets(2000):
        sizes = []
        for tensor in bucket:
            spec = next(specs)
            assert (tuple(tensor.shape), tensor.dtype) == (spec.shape, torch.bfloat16)
            sizes.append(spec.num_bytes)
        assert len(sizes) == 1 or sum(sizes) <= 2000
    assert next(specs, None) is None


def test_parameters_are_cast_and_buffers_keep_their_dtype(tmp_path: Path) -> None:
    """A router's bias is a persistent buffer in float32, whatever the weights are; rotary tables are not saved."""
    model = build("dense")
    gate = model.model.layers[1].mlp
    gate.register_buffer("e_score_correction_bias", torch.randn(5))
    gate.register_buffer("num_seen", torch.tensor(7))
    gate.register_buffer("scratch", torch.zeros(2), persistent=False)
    sent = collect(ShardedParameters(model, wire_dtype=torch.bfloat16))
    assert sorted(sent) == sorted(_saved(model, tmp_path))
    bias = sent.pop("model.layers.1.mlp.e_score_correction_bias")
    assert torch.equal(bias, gate.e_score_correction_bias)
    assert (bias.dtype, sent.pop("model.layers.1.mlp.num_seen")) == (torch.float32, torch.tensor(7))
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}


def _merged(model: Any) -> dict[str, torch.Tensor]:
    merged = model.merge_and_unload()
    return {name: tensor.detach().clone() for name, tensor in merged.state_dict().items()}


def test_adapters_are_merged_as_peft_merges_them() -> None:
    model = build("lora")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sent = collect(ShardedParameters(model, wire_dtype=torch.float32))
    assert all(
        torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()
    )  # the model is as it was
    plain = {name: tensor.detach().clone() for name, tensor in build("untied").state_dict().items()}
    changed = {name for name in sent if not torch.equal(sent[name], plain[name])}
    targets = [
        name for name in plain if any(part in name for part in ("q_proj", "down_proj", "gate_proj", "embed_tokens"))
    ]
    assert changed == set(targets)
    _equal(sent, _merged(model), rtol=1e-5, atol=1e-6)


def test_only_the_active_adapters_that_are_not_merged_yet_are_added() -> None:
    one = build("lora")
    one.base_model.set_adapter("two")
    _equal(collect(ShardedParameters(one, wire_dtype=torch.float32)), _merged(one), rtol=1e-5, atol=1e-6)
    both = build("lora")
    expected = _merged(build("lora"))
    both.merge_adapter(["one"])
    _equal(collect(ShardedParameters(both, wire_dtype=torch.float32)), expected, rtol=1e-5, atol=1e-6)
    off = build("lora")
    with off.disable_adapter():
        sent = collect(ShardedParameters(off, wire_dtype=torch.float32))
    _equal(sent, {name: tensor.detach() for name, tensor in build("untied").state_dict().items()})


def test_transposed_weights_biases_and_fully_trained_modules_under_adapters() -> None:
    """GPT-2 keeps its weights as (in, out): fan_in_fan_out."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(1)
    base = GPT2LMHeadModel(
        GPT2Config(vocab_size=30, n_embd=16, n_layer=1, n_head=2, n_positions=8, tie_word_embeddings=False)
    )
    config = LoraConfig(
        r=3, target_modules=["c_attn"], fan_in_fan_out=True, lora_bias=True, modules_to_save=["ln_f"], bias="lora_only"
    )
    model = get_peft_model(base, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter))
    sent = collect(ShardedParameters(model, wire_dtype=torch.float32))
    assert "transformer.h.0.attn.c_attn.bias" in sent
    _equal(sent, _merged(model), rtol=1e-5, atol=1e-6)


def test_adapters_that_cannot_be_merged_weight_by_weight_are_refused_by_name() -> None:
    from peft import LoraConfig, get_peft_model

    dora = get_peft_model(build("untied"), LoraConfig(r=2, target_modules=["q_proj"], use_dora=True))
    with pytest.raises(ConfigError, match=r"layers\.0\.self_attn\.q_proj is of the variant Dora"):
        ShardedParameters(dora, wire_dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"model\.embed_tokens\.weight and lm_head\.weight are one tied weight"):
        ShardedParameters(with_adapters(build("dense")), wire_dtype=torch.float32)
    ShardedParameters(with_adapters(build("dense"), embeddings=False), wire_dtype=torch.float32)


@pytest.mark.slow
def test_two_ranks_gather_what_one_has(tmp_path: Path) -> None:
    kinds = ["dense", "moe", "lora"]
    run_on_ranks("gather", 2, tmp_path, module="tests.training.parameter_models", kinds=kinds, out=tmp_path)
    for kind in kinds:
        sent = torch.load(tmp_path / f"{kind}.pt", weights_only=True)
        expected = collect(ShardedParameters(build(kind), wire_dtype=torch.float32))
        assert list(sent) == list(expected)
        _equal(sent, expected, rtol=1e-6, atol=1e-7)
