"""Tiny random models of several families, and micro-batches packed by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from grpo_async.batching.pack import MicroBatch, split_by_rank
from grpo_async.batching.plan import BatchPlan, MicroBatchPlan, plan_batch
from grpo_async.batching.prefixes import prefix_order
from grpo_async.records import RolloutSample
from tests.support.records import make_sample
from tests.support.trees import random_tree

WINDOW = 8  # shorter than most samples
LENGTHS = [13, 30, 2, 24, 17]
ROWS = [[0, 1], [2, 3, 4]]  # of samples of these lengths
ROW_TOKENS = 50
_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,  # large enough for every token to matter
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MIXED = ["sliding_attention", "full_attention"]
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_SHARED_EXPERT = {**_EXPERTS, "shared_expert_intermediate_size": 24}
_ROUTED = {  # of DeepSeek and those that follow it
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
}
_LATENT = {
    **_ROUTED,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "num_key_value_heads": 4,
}
_INDEXED = {**_LATENT, "q_lora_rank": 16, "index_topk": 64, "index_n_heads": 4, "index_head_dim": 16}
_MAMBA2 = {f"mamba_{name}": size for name, size in (("n_heads", 8), ("d_head", 8), ("d_state", 8), ("chunk_size", 16))}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3": ("qwen3", {}),
    "mistral": ("mistral", {"sliding_window": WINDOW}),
    "phi3": ("phi3", {"sliding_window": WINDOW}),
    "gemma2": (
        "gemma2",
        {
            "sliding_window": WINDOW,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 3,
        },
    ),
    "gemma3": ("gemma3_text", {"sliding_window": WINDOW, "query_pre_attn_scalar": 3, "layer_types": _MIXED}),
    "granite": (
        "granite",
        {"logits_scaling": 0.5, "attention_multiplier": 0.9, "residual_multiplier": 0.7, "embedding_multiplier": 2.0},
    ),
    "cohere2": ("cohere2", {"logit_scale": 0.25, "sliding_window": WINDOW, "layer_types": _MIXED}),
    "qwen3-moe": ("qwen3_moe", _EXPERTS),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": WINDOW}),
    "qwen2-moe": ("qwen2_moe", _SHARED_EXPERT),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3.5": ("qwen3_5_text", _LINEAR),
    "qwen3.5-moe": ("qwen3_5_moe_text", {**_LINEAR, **_SHARED_EXPERT}),
    "qwen3-next": ("qwen3_next", {**_LINEAR, **_SHARED_EXPERT}),
    "olmo-hybrid": ("olmo_hybrid", _LINEAR),
    "kimi-linear": (
        "kimi_linear",
        {**_LATENT, **_LINEAR, "num_experts": 4, "linear_num_heads": 2, "linear_head_dim": 8},
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "lfm2-moe": ("lfm2_moe", {**_EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    "granite-hybrid": (
        "granitemoehybrid",
        {**_MAMBA2, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 48, "num_local_experts": 0},
    ),
    "nemotron-h": (
        "nemotron_h",
        {
            **_ROUTED,
            "mamba_num_heads": 8,
            "mamba_head_dim": 8,
            "ssm_state_size": 8,
            "n_groups": 2,
            "chunk_size": 16,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"],
            "num_hidden_layers": 4,
            "moe_shared_expert_intermediate_size": 24,
        },
    ),
    "falcon-h1": ("falcon_h1", {**_MAMBA2, "mamba_d_ssm": 64, "mamba_n_groups": 2, "lm_head_multiplier": 0.5}),
    "mamba2": ("mamba2", {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 16}),
    "jamba": (
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_d_state": 8, "mamba_dt_rank": 4},
    ),
    "bamba": ("bamba", {**_MAMBA2, "attn_layer_indices": [1], "mamba_n_groups": 2}),
    "gemma4": (
        "gemma4_text",
        {
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "global_head_dim": 16,
            "vocab_size_per_layer_input": 320,
            "hidden_size_per_layer_input": 8,
        },
    ),
    "gpt-oss": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": WINDOW,
            "layer_types": _MIXED,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "llama4": (
        "llama4_text",
        {"num_local_experts": 4, "num_experts_per_tok": 1, "attention_chunk_size": 64, "intermediate_size_mlp": 48},
    ),
    "deepseek-v3": ("deepseek_v3", _LATENT),
    "deepseek-v3.2": ("deepseek_v32", _INDEXED),
    "glm-4-moe": ("glm4_moe", _ROUTED),
    "glm-5": ("glm_moe_dsa", _INDEXED),
    "gpt2": ("gpt2", {"n_positions": 512, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0}),
}


def build_family(name: str, **settings: Any) -> Any:
    """A random model with the attention that transformers computes most plainly (soft-capping and sinks: eager, else sdpa)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model_type, own = FAMILIES[name]
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **{**_SIZES, **own, **settings})
    plain = "eager" if model_type in ("gemma2", "gpt_oss", "mamba2") else "sdpa"
    model = AutoModelForCausalLM.from_config(config, attn_implementation=plain, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms begin as zeros and ones
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def samples_of(lengths: Sequence[int]) -> list[RolloutSample]:
    """Samples of so many tokens, trained from the second one on."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for length in lengths:
        ids = torch.randint(3, 320, (length,), generator=generator).tolist()
        samples.append(make_sample(prompt=ids[:1], completion=ids[1:], logprobs=[-1.0] * (length - 1)))
    return samples


def pack_rows(samples: Sequence[RolloutSample], rows: Sequence[Sequence[int]], row_tokens: int) -> MicroBatch:
    """One micro-batch with exactly these rows; its trained tokens come in the order of the rows. Without rows, that of a rank
    without samples."""
    plan = BatchPlan(ranks=[[MicroBatchPlan(rows=rows, row_tokens=row_tokens)]])
    (batch,) = split_by_rank(samples, [1.0] * len(samples), plan, trainer_version=0)[0].pack()
    return batch


def tree_samples(seed: int, count: int = 8) -> list[RolloutSample]:
    """Samples with shared prefixes, in the order in which `pack_tree` has them."""
    trees = [np.array(ids, np.int32) for ids in random_tree(random.Random(seed), count)]
    order = prefix_order(trees).order.tolist()
    return [make_sample(prompt=trees[index][:1].tolist(), completion=trees[index][1:].tolist()) for index in order]


def pack_tree(samples: Sequence[RolloutSample], *, context_parallel: int = 1) -> MicroBatch:
    """One micro-batch with each distinct prefix once."""
    plan = plan_batch(
        [len(sample.token_ids) for sample in samples],
        world_size=1,
        micro_batch_tokens=4096,
        pack=True,
        prefixes=prefix_order([sample.token_ids for sample in samples]),
        row_multiple=context_parallel,
    )
    (part,) = split_by_rank(samples, [1.0] * len(samples), plan, trainer_version=0)
    (batch,) = part.pack(context_parallel=context_parallel)
    return batch
