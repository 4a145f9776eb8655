"""Loads the policy from a Hugging Face folder, and refuses models whose log-probabilities the trainer would get wrong."""

from __future__ import annotations

from typing import Any

import torch

from grpo_async.config.model_sections import ModelSection
from grpo_async.errors import ConfigError
from grpo_async.training.policy import Policy

# settings that change logits after the head; leaving them out would train another distribution than the server samples
_LOGIT_CHANGES = ("final_logit_softcapping", "logits_scaling", "logit_scale")


def load_policy(section: ModelSection, *, temperature: float, chunk_tokens: int, max_model_len: int) -> Policy:
    """Load the model in `model.dtype` on the CPU, without dropout: the server that samples has none either.

    Args:
        max_model_len: longest sample, in tokens.

    Raises:
        ConfigError: no model at `model.path`, or one whose log-probabilities the trainer would get wrong.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(section.path, trust_remote_code=section.trust_remote_code)
        _check_config(config, section.path, max_model_len)
        for name, value in config.to_dict().items():
            if "drop" in name and isinstance(value, float):
                setattr(config, name, 0.0)
        model = AutoModelForCausalLM.from_pretrained(
            # our mask is boolean: sdpa takes it as such, eager attention would add it to the scores
            section.path,
            config=config,
            dtype=getattr(torch, section.dtype),
            attn_implementation="sdpa",
            trust_remote_code=section.trust_remote_code,
        )
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path: cannot load a causal language model from {section.path!r}: {error}") from error
    if section.activation_checkpointing == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()
    return Policy(model, temperature=temperature, chunk_tokens=chunk_tokens)


def _check_config(config: Any, path: str, max_model_len: int) -> None:
    for name in _LOGIT_CHANGES:
        if getattr(config, name, None) not in (None, 1, 1.0):
            raise ConfigError(
                f"model.path: {path!r} sets `{name}`, which the trainer's log-probabilities do not apply; "
                "models of this family cannot be trained yet"
            )
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    has_window = "sliding_attention" in layer_types if layer_types else getattr(config, "use_sliding_window", True)
    if window is not None and has_window and window < max_model_len:
        raise ConfigError(
            f"model.path: {path!r} attends over a sliding window of {window} tokens, which the trainer does not apply; "
            f"set inference.max_model_len (now {max_model_len}) to at most {window}"
        )
