"""Decides which models the embedded engine can serve with pushed weights; docs/models.md has the same as a table.

It uses config.json alone, so that the launcher can decide before anything is started; the engine checks itself once it has loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_async.errors import ConfigError

_OTHER_ATTENTION = {
    "gemma2": "caps its attention scores",
    "gpt_oss": "has attention sinks",
    "bloom": "has its own attention (ALiBi)",
    "gemma3n_text": "shares keys and values between layers",
    "gemma4_text": "has heads of several sizes",
}
_RECURRENT = {
    *("mamba", "mamba2", "falcon_mamba", "rwkv", "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "kimi_linear"),
    *("lfm2", "lfm2_moe", "jamba", "bamba", "falcon_h1", "nemotron_h", "granitemoehybrid", "zamba2", "olmo_hybrid"),
}
"""Families with recurrent layers: a config.json on the hub may leave out `layer_types`, which transformers then derives."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def check_embedded_family(config: Mapping[str, Any], max_model_len: int) -> None:
    """Raise ConfigError where the engine would compute a model with this config.json wrongly, or could not load its weights."""
    name = str(config.get("model_type", "this model"))
    others = ", ".join(other_layers(config))
    reason = _OTHER_ATTENTION.get(name) or (others and f"has layers of the kind {others}") or _other_weights(config)
    if reason:
        raise ConfigError(f"inference.engine: embedded cannot serve {name}, which {reason}; set inference.engine: vllm")
    window = _window(config)
    if window is not None and window < max_model_len:
        raise ConfigError(
            f"inference.engine: embedded does not support sliding windows, and {name} attends to the last {window} tokens "
            f"only; set inference.max_model_len (now {max_model_len}) to at most {window}, or inference.engine: vllm"
        )


def _window(config: Mapping[str, Any]) -> int | None:
    """Number of tokens that a layer with a sliding window sees; None if no layer has one."""
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    slides = "sliding_attention" in kinds if kinds else config.get("use_sliding_window", True)
    return window if slides and isinstance(window, int) and window > 0 else None


def _other_weights(config: Mapping[str, Any]) -> str:
    """The property of the weights, or of their cached values, that the engine does not support; "" if none."""
    if has_experts(config):
        return "is a mixture of experts, whose weights cannot be pushed to it"
    return "keeps compressed keys and values" if config.get("kv_lora_rank") else ""


def has_experts(config: Mapping[str, Any]) -> bool:
    return any(isinstance(count := config.get(key), int) and count > 1 for key in _EXPERTS)


def other_layers(config: Mapping[str, Any]) -> list[str]:
    """The layer types that are not attention with a cache for each token."""
    kinds = config.get("layer_types") or (["recurrent"] if config.get("model_type") in _RECURRENT else [])
    return sorted(set(kinds) - {"full_attention", "sliding_attention", "attention"})
