"""Decides which model families the trainer computes as a server does; the others are refused before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_async.errors import ConfigError
from grpo_async.servers.embedded.families import other_layers

# settings that change logits after the head and that LogitTransform does not implement
_LOGIT_CHANGES = ("lm_head_multiplier", "output_multiplier", "logits_mup_width_multiplier")


def check_family(config: Mapping[str, Any], path: str, max_model_len: int) -> None:
    """Check the text part of a config.json: ConfigError if the trainer's log-probabilities would differ from the server's, or
    packed samples, of at most `max_model_len` tokens, would see each other."""
    for name in _LOGIT_CHANGES:
        if config.get(name) not in (None, 1, 1.0):
            raise ConfigError(
                f"model.path: {path!r} sets `{name}`, which the trainer's log-probabilities do not include; "
                "models of this family cannot be trained yet"
            )
    others = other_layers(config)
    chunk = config.get("attention_chunk_size")
    if "chunked_attention" in others and chunk is not None:
        if chunk < max_model_len:
            raise ConfigError(
                f"model.path: {path!r} attends within chunks of {chunk} tokens, which the trainer does not support; "
                f"set inference.max_model_len (now {max_model_len}) to at most {chunk}"
            )
        others.remove("chunked_attention")
    if others:
        raise ConfigError(
            f"model.path: {path!r} has layers of the kind {', '.join(others)}, which would carry one sample of a packed row into "
            "the next; models of this family cannot be trained yet"
        )


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
