"""Which model families the trainer's forward computes as a server does; the others are refused before anything is loaded."""

from __future__ import annotations

from typing import Any

from grpo_async.errors import ConfigError

# what changes logits after the head and LogitTransform does not know
_LOGIT_CHANGES = ("lm_head_multiplier", "output_multiplier", "logits_mup_width_multiplier")
_LAYER_TYPES = {"full_attention", "sliding_attention"}


def check_family(config: Any, path: str, max_model_len: int) -> None:
    """Look at a Hugging Face config.

    Args:
        max_model_len: longest sample, in tokens.

    Raises:
        ConfigError: log-probabilities of the trainer would not be those of the server, or packed samples would see each other.
    """
    text = config.get_text_config()
    for name in _LOGIT_CHANGES:
        if getattr(text, name, None) not in (None, 1, 1.0):
            raise ConfigError(
                f"model.path: {path!r} sets `{name}`, which the trainer's log-probabilities do not apply; "
                "models of this family cannot be trained yet"
            )
    layer_types = set(getattr(text, "layer_types", None) or ())
    chunk = getattr(text, "attention_chunk_size", None)
    if "chunked_attention" in layer_types and chunk is not None:
        if chunk < max_model_len:
            raise ConfigError(
                f"model.path: {path!r} attends within chunks of {chunk} tokens, which the trainer does not apply; "
                f"set inference.max_model_len (now {max_model_len}) to at most {chunk}"
            )
        layer_types.discard("chunked_attention")
    others = sorted(layer_types - _LAYER_TYPES)
    if others:
        raise ConfigError(
            f"model.path: {path!r} has layers of the kind {', '.join(others)}, which would carry one sample of a packed row into "
            "the next; models of this family cannot be trained yet"
        )
