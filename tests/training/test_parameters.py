"""What is sent of a model equals what its checkpoint holds: names, shapes, values, order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from grpo_async.config.sections import LoraSection
from grpo_async.training import parameters as module
from grpo_async.training.lora import add_adapters
from grpo_async.training.parameters import ShardedParameters
from tests.support.ranks import run_on_ranks
from tests.training.tiny_models import collect

BUCKET_BYTES = 3000  # several buckets, and layers that are split over two


def build(kind: str) -> Any:
    """A randomly initialized model, the same for the same `kind`: dense, untied, moe, or lora with adapters that are not zero."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "head_dim": 8, "tie_word_embeddings": kind == "dense",
    }  # fmt: skip
    if kind == "moe":
        return Qwen3MoeForCausalLM(
            Qwen3MoeConfig(**sizes, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2)
        )
    model: Any = Qwen3ForCausalLM(Qwen3Config(**sizes))
    if kind == "lora":
        add_adapters(model, LoraSection(rank=4, alpha=12.0, target_modules=["q_proj", "down_proj"]))
        for module in model.modules():
            for name, parameter in module._parameters.items():
                if parameter is not None and parameter.is_meta:
                    module._parameters[name] = nn.Parameter(0.3 * torch.randn(parameter.shape))
    return model


def gather(kinds: list[str], out: str) -> None:
    """What a sharded model of each kind sends goes to a file in `out`. Run by `run_on_ranks`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in kinds:
        model = build(kind)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for wire in (torch.float32, torch.bfloat16):
            sent = collect(ShardedParameters(model, wire_dtype=wire), BUCKET_BYTES)
            if dist.get_rank() == 0:
                torch.save(sent, f"{out}/{kind}-{wire}.pt")


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


def test_parameters_are_cast_before_they_are_gathered_and_buffers_keep_their_dtype(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router's bias is a persistent buffer in float32, whatever the weights are; rotary tables are not saved."""
    gathered: list[torch.Tensor] = []
    monkeypatch.setattr(module, "whole_of", lambda tensor: gathered.append(tensor) or tensor)
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
    assert [tensor.numel() for tensor in gathered if tensor.dtype != torch.bfloat16] == [5, 1]


def test_adapters_are_merged_as_peft_merges_them() -> None:
    model = build("lora")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sent = collect(ShardedParameters(model, wire_dtype=torch.float32))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items()), "it is as it was"
    plain = dict(build("untied").state_dict())
    changed = {name for name in sent if not torch.equal(sent[name], plain[name])}
    assert changed == {name for name in plain if any(part in name for part in ("q_proj", "down_proj"))}
    for name, layer in list(model.named_modules()):
        if hasattr(layer, "lora_A"):
            layer.merge()
            torch.testing.assert_close(
                sent[f"{name}.weight"], layer.get_base_layer().weight.detach(), rtol=1e-5, atol=1e-6
            )


@pytest.mark.slow
def test_two_ranks_gather_what_one_has(tmp_path: Path) -> None:
    kinds = ["dense", "moe", "lora"]
    run_on_ranks("gather", 2, tmp_path, module=__name__, kinds=kinds, out=tmp_path)
    for kind in kinds:
        for wire, tolerance in ((torch.float32, 1e-6), (torch.bfloat16, 0.01)):
            sent = torch.load(tmp_path / f"{kind}-{wire}.pt", weights_only=True)
            expected = collect(ShardedParameters(build(kind), wire_dtype=wire))
            assert list(sent) == list(expected)
            _equal(sent, expected, rtol=tolerance, atol=1e-7)
