"""Models with random weights: their shapes, what they compute and move, and what a GPU can do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_async.checks.memory import ModelSize, trainer_memory
from grpo_async.config import ExperimentConfig
from grpo_async.utils.devices import Peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A dense decoder with grouped-query attention and a gated MLP (Qwen3, Llama 3)."""

    vocab: int = 151936
    hidden: int
    layers: int = 28
    heads: int = 16
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int
    tied: bool = True

    @property
    def num_parameters(self) -> int:
        """N, parameters of the matrix products (the norms have some thousands more): layers x (2 H A + 2 H K + 3 H I) + V H, with
        H hidden, A = heads x head_dim, K = kv_heads x head_dim, I intermediate. An embedding of its own does not count: a lookup
        computes nothing."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocab * self.hidden

    @property
    def size(self) -> ModelSize:
        """As the plan knows it, with what it computes and moves; of its `parameters` N are in `computed`."""
        return ModelSize(
            parameters=self.num_parameters + (0 if self.tied else self.vocab * self.hidden),
            hidden=self.hidden,
            layers=self.layers,
            vocabulary=self.vocab,
            kv_elements_per_token=2 * self.layers * self.kv_heads * self.head_dim,
            query_width=self.heads * self.head_dim,
            is_tied=self.tied,
        )

    def build(self, *, seed: int, dtype: str = "float32", max_length: int = 2048, **more: Any) -> Any:
        """A Qwen3 with random weights, the same for the same seed. `more`: fields of its config."""
        import torch
        from transformers import Qwen3Config, Qwen3ForCausalLM

        torch.manual_seed(seed)
        fields = {
            "vocab_size": self.vocab, "hidden_size": self.hidden, "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads, "head_dim": self.head_dim,
            "intermediate_size": self.intermediate, "max_position_embeddings": max_length, "tie_word_embeddings": self.tied, **more,
        }  # fmt: skip
        return Qwen3ForCausalLM(Qwen3Config(**fields)).to(getattr(torch, dtype))

    def save(self, folder: Path, tokenizer: Any, **more: Any) -> Any:
        """Write such a model and the tokenizer to `folder`; returns the model, which takes no gradients."""
        ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
        model = self.build(**ids, **more)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        return model.eval().requires_grad_(False)


SHAPES = {
    "tiny": ModelShape(vocab=512, hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=192),
    "small": ModelShape(vocab=8192, hidden=256, layers=4, heads=4, kv_heads=2, head_dim=64, intermediate=768),
    "95m": ModelShape(vocab=8192, hidden=512, layers=23, heads=8, kv_heads=4, head_dim=64, intermediate=2048),
    "0.6b": ModelShape(hidden=1024, intermediate=3072),
    "1.7b": ModelShape(hidden=2048, intermediate=6144),
    "4b": ModelShape(hidden=2560, layers=36, heads=32, intermediate=9728),
    "7b": ModelShape(vocab=152064, hidden=3584, heads=28, kv_heads=4, intermediate=18944, tied=False),  # Qwen2.5
    "8b": ModelShape(hidden=4096, layers=36, heads=32, intermediate=12288, tied=False),
    "32b": ModelShape(hidden=5120, layers=64, heads=64, intermediate=25600, tied=False),
    "70b": ModelShape(vocab=128256, hidden=8192, layers=80, heads=64, intermediate=28672, tied=False),  # Llama 3
}
"""Shapes of Qwen3 models, except where a comment names another."""


def trainer_bytes(shape: ModelShape, *, ranks: int, tokens: int, optimizer: str = "adamw") -> float:
    """Bytes of one of `ranks` GPUs that train, by the plan's formula (grpo_async.checks.memory): float32 masters, bfloat16, full
    checkpointing, micro-batches of `tokens`."""
    config = ExperimentConfig.model_validate(
        {
            "run": {"name": "estimate"},
            "model": {"path": "a-model", "compute_dtype": "bfloat16", "activation_checkpointing": "full"},
            "data": {"train": {"type": "jsonl", "path": "rows.jsonl"}},
            "rewards": [{"function": "a_module:reward"}],
            "rollout": {"groups_per_step": ranks},
            "training": {"micro_batch_tokens": tokens},
            "inference": {"max_model_len": min(tokens, 2048)},
            "optimizer": {"type": optimizer},
            "launch": {"num_trainer_ranks": ranks},
        }
    )
    config = config.for_devices(trains_on_gpu=True, serves_on_gpu=True)
    return sum(trainer_memory(config, shape.size).values())


def generation_bound_s(
    model: ModelSize, peaks: Peaks, *, in_flight: int, prompt: int, completion: int, itemsize: int
) -> float:
    """The least seconds in which `in_flight` completions can be generated: the prompts at the peak of FLOP/s, then `completion`
    steps, each of which reads all weights once and the KV of all, or computes, whichever takes longer.

    Worked example: N = 1e9 in 16 bit, 1 in flight, 1e12 bytes/s: 2 ms a token, 500 tokens/s at most; with 8 in flight 4000.
    """
    prefill = in_flight * prompt * model.forward_flops(prompt / 2) / peaks.flops
    context = prompt + completion / 2
    num_bytes = model.served * itemsize + in_flight * context * model.kv_elements_per_token * itemsize
    flops = in_flight * model.forward_flops(context)
    return prefill + completion * max(num_bytes / peaks.memory, flops / peaks.flops)
