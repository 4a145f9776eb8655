"""FLOPs of a step: as torch counts the operations that it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grpo_async.training.flops import peak_flops, training_flops
from tests.training.tiny_families import build_family


@pytest.mark.parametrize(
    ("family", "settings"), [("qwen3", {}), ("gpt2", {}), ("mixtral", {"sliding_window": None})], ids=str
)
def test_the_flops_of_a_step_are_those_that_torch_counts(family: str, settings: dict[str, Any]) -> None:
    """12 tokens, whose logits are all computed, in plain attention, which computes every pair."""
    model: Any = build_family(family, **settings)
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(3, 15)[None], use_cache=False).logits.sum().backward()
    assert training_flops(model, 12, 12, 12 * 12) == counter.get_total_flops()


def test_frozen_weights_take_two_thirds_and_a_cpu_has_no_peak() -> None:
    model = build_family("qwen3")
    whole = training_flops(model, 100, 0, 0)
    model.requires_grad_(False)
    assert training_flops(model, 100, 0, 0) == pytest.approx(whole * 2 / 3)
    assert peak_flops(torch.device("cpu"), "bfloat16") is None


def test_a_token_attends_to_a_window_at_most() -> None:
    """12 tokens in a window of 3, in both layers: 36 pairs at most, 12 FLOPs for each of the values of all heads."""
    model = build_family("mixtral", sliding_window=3)
    width = model.config.num_attention_heads * model.config.head_dim
    missing = training_flops(model, 12, 12, 36) - training_flops(model, 12, 12, 0)
    assert missing == 12 * width * 36 * model.config.num_hidden_layers
    assert training_flops(model, 12, 12, 12 * 12) == training_flops(model, 12, 12, 36)
