"""FLOPs of a step: as torch counts the operations that it runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from grpo_async.training.flops import peak_flops, training_flops
from tests.training.tiny_families import build_family


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "mixtral"])
def test_the_flops_of_a_step_are_those_that_torch_counts(family: str) -> None:
    """12 tokens, whose logits are all computed, in plain attention, which computes every pair."""
    model: Any = build_family(family)
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
