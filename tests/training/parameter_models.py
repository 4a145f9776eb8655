"""Tiny models for the tests of parameters, built the same way on every rank, and what the ranks do with them."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from grpo_async.training.parameters import ShardedParameters

BUCKET_BYTES = 3000  # several buckets, and layers that are split over two


def build(kind: str) -> Any:
    """A randomly initialised model, the same for the same `kind`: dense, untied, moe or lora."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 40,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
    }
    if kind == "moe":
        config = Qwen3MoeConfig(
            **sizes, moe_intermediate_size=8, num_experts=4, num_experts_per_tok=2, tie_word_embeddings=False
        )
        return Qwen3MoeForCausalLM(config)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes, tie_word_embeddings=kind == "dense"))
    return with_adapters(model) if kind == "lora" else model


def with_adapters(model: Any, *, embeddings: bool = True, names: tuple[str, ...] = ("one", "two")) -> Any:
    """Two active adapters of different ranks and scalings, whose B is not zero as it is at the start of a training."""
    from peft import LoraConfig, get_peft_model

    targets = ["q_proj", "down_proj", *(["embed_tokens"] if embeddings else [])]
    first = LoraConfig(r=4, lora_alpha=12, target_modules=targets, use_rslora=True)
    second = LoraConfig(r=2, lora_alpha=3, target_modules=["q_proj", "gate_proj"])
    peft_model: Any = get_peft_model(model, first, adapter_name=names[0])
    peft_model.add_adapter(names[1], second)
    peft_model.base_model.set_adapter(list(names))
    with torch.no_grad():
        for name, parameter in peft_model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn_like(parameter) * 0.3)
    return peft_model


def collect(parameters: ShardedParameters, bucket_bytes: int = BUCKET_BYTES) -> dict[str, torch.Tensor]:
    """Copies of everything that would be sent, by name, in its order."""
    tensors = [tensor for bucket in parameters.buckets(bucket_bytes) for tensor in bucket]
    assert all(tensor.is_contiguous() for tensor in tensors)
    copies = (tensor.clone() for tensor in tensors)  # they may be the model's own
    return dict(zip((spec.name for spec in parameters.specs), copies, strict=True))


def gather(kinds: list[str], out: str) -> None:
    """What a sharded model of each kind sends goes to a file in `out`."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for kind in kinds:
        model = build(kind)
        layers: Any = (model.get_base_model() if kind == "lora" else model).model.layers
        for layer in layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        sent = collect(ShardedParameters(model, wire_dtype=torch.float32))
        if dist.get_rank() == 0:
            torch.save(sent, f"{out}/{kind}.pt")
