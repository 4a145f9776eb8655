"""Which tensors of a checkpoint are those of its text model."""

from __future__ import annotations

import pytest

from grpo_async.weights.weight_files import text_weights


@pytest.mark.parametrize(
    ("text", "other"),
    [
        ("model.language_model.layers.0.linear_attn.A_log", "model.visual.blocks.0.attn.qkv.weight"),  # Qwen 3.5
        ("model.language_model.layers.1.self_attn.q_proj.weight", "mtp.layers.0.self_attn.q_proj.weight"),
        ("language_model.model.layers.1.mlp.up_proj.weight", "multi_modal_projector.linear_1.weight"),  # Llama 4
        ("model.language_model.embed_tokens.weight", "model.embed_vision.embedding_projection.weight"),  # Gemma 4
        ("lm_head.weight", "model.audio_tower.layers.0.norm_out.weight"),
        ("model.layers.1.mlp.gate.weight", "model.layers.2.eh_proj.weight"),  # DeepSeek-V3: layers after the last one
        ("model.norm.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"),
    ],
)
def test_towers_and_layers_for_further_tokens_are_left_out(text: str, other: str) -> None:
    assert text_weights([other, text], num_layers=2) == [text]
