"""Decides which model families the trainer computes as a server does; the others are refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from grpo_async.errors import ConfigError
from grpo_async.servers.embedded.families import other_layers

# settings that change logits after the head and that LogitTransform does not implement
_LOGIT_CHANGES = ("output_multiplier", "logits_mup_width_multiplier")
_STATEFUL = {"linear_attention", "conv", "hybrid", "mamba", "mamba2", "recurrent"}
"""Layer types that carry a state along the row. Nemotron-H lists its layers without attention, too: mlp, moe."""

_PACKED_BY_KERNELS = {"qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "olmo_hybrid"}
"""Families whose layers hand `cu_seq_lens_q` to flash-linear-attention and `seq_idx` to causal-conv1d, in transformers 5.19."""

_SWAPPED = {
    "gemma2", "gemma3_text", "lfm2", "llama", "mistral", "opt", "phi3", "qwen2", "qwen3", "qwen3_5_text",
}  # fmt: skip
"""Families with which vLLM was seen to compute adapters as the trainer does (tests/vllm/test_families.py, nightly)."""


def swaps_adapters(config: Mapping[str, Any]) -> bool:
    """Whether vLLM's own adapters serve this family, by the text part of its config.json."""
    return config.get("model_type") in _SWAPPED


def check_family(config: Mapping[str, Any], path: str, max_model_len: int) -> None:
    """Check the text part of a config.json: ConfigError if the trainer's log-probabilities would differ from the server's, or
    packed samples, of at most `max_model_len` tokens, would see each other."""
    for name in _LOGIT_CHANGES:
        if config.get(name) not in (None, 1, 1.0):
            raise ConfigError(
                f"model.path: {path!r} sets `{name}`, which the trainer's log-probabilities do not include; "
                "models of this family cannot be trained yet"
            )
    if config.get("quantization_config"):
        raise ConfigError(
            f"model.path: the weights of {path!r} are quantized (`quantization_config`), and pushed weights are not; take a copy "
            "in 16 or 32 bits (and model.lora.load_in_4bit, if the trainer's memory is short)"
        )
    others = set(other_layers(config)) - _STATEFUL - {"mlp", "moe"}
    for kind, limit in (("chunked_attention", "attention_chunk_size"), ("indexed_attention", "index_topk")):
        seen = config.get(limit)
        if kind in others and isinstance(seen, int):
            if seen < max_model_len:
                raise ConfigError(
                    f"model.path: {path!r} has layers whose tokens attend to {seen} tokens (`{limit}`), which the trainer does not "
                    f"support; set inference.max_model_len (now {max_model_len}) to at most {seen}"
                )
            others.remove(kind)
    if others:
        raise ConfigError(
            f"model.path: {path!r} has layers of the kind {', '.join(sorted(others))}, which the trainer does not compute as a "
            "server does; models of this family cannot be trained yet"
        )


def check_context_parallel(config: Mapping[str, Any], path: str, size: int) -> None:
    """Check that `size` ranks can compute a sample of this model together. Raises ConfigError."""
    if not shares_prefixes(config):
        raise ConfigError(
            f"training.context_parallel: layers of {path!r} carry a state along the row, or count positions by it, so ranks cannot "
            "divide it; leave it out"
        )
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    if heads % size or (kv_heads % size and size % kv_heads):
        raise ConfigError(
            f"training.context_parallel: {size} ranks cannot share the {heads} attention heads of {path!r}, {kv_heads} of keys and "
            "values; set it to a number that divides both"
        )


def shares_prefixes(config: Mapping[str, Any]) -> bool:
    """Whether samples can share a prefix. False: layers carry a state along the row (linear attention, convolutions, state spaces),
    or count positions by it (Llama 4's temperature)."""
    return config.get("model_type") != "llama4_text" and _STATEFUL.isdisjoint(other_layers(config))


def one_sample_per_row(config: Mapping[str, Any], *, device_type: str = "cpu") -> bool:
    """Whether samples that share nothing cannot be packed either. Kernels for GPUs begin a new state where a sample begins."""
    has_kernels = device_type == "cuda" and all(find_spec(package) for package in ("fla", "causal_conv1d"))
    return not shares_prefixes(config) and not (has_kernels and config.get("model_type") in _PACKED_BY_KERNELS)


def count_attention_layers(config: Any) -> int:
    """Count the layers of a Hugging Face config that have attention with a cache for each token."""
    kinds = getattr(config, "layer_types", None) or ["attention"] * config.num_hidden_layers
    return sum(("attention" in kind and kind != "linear_attention") or kind == "hybrid" for kind in kinds)


def check_tokenizer_size(num_ids: int, num_embeddings: int | None) -> None:
    """Check that every id of the tokenizer has a row in the model's embedding (None: its size is not known). Raises ConfigError."""
    if num_embeddings is not None and num_ids > num_embeddings:
        raise ConfigError(
            f"model.path: the tokenizer has {num_ids} ids, the model's embedding {num_embeddings} rows: it belongs to another "
            "model, or tokens were added to it; use the model's own tokenizer, or resize the embedding to it and save the model"
        )


def check_vocabulary(path: str, *, ours: int | None, theirs: int | None) -> None:
    """Check that the reference at `path` has the policy's vocabulary (None: its size is not known). Raises ConfigError."""
    if ours is not None and theirs is not None and ours != theirs:
        raise ConfigError(
            f"loss.reference: {path!r} has a vocab_size of {theirs}, model.path one of {ours}; the reference has to use the "
            "policy's tokenizer, and have as many rows in its embedding"
        )
