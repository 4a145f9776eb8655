"""Model FLOPs utilization (MFU, arXiv 2204.02311): FLOPs that training needs / FLOPs that the GPUs could have done."""

from __future__ import annotations

from typing import Any

import torch

from grpo_async.training.model import decoder_layers
from grpo_async.utils.devices import listed_peaks

_NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")  # as families name it


def peak_flops(device: torch.device, compute_dtype: str) -> float | None:
    """Return the peak of one device in FLOP/s; None if it is not known, or the forward pass has more than 16 bits."""
    if device.type != "cuda" or compute_dtype == "float32":
        return None
    peaks = listed_peaks(torch.cuda.get_device_name(device))
    return None if peaks is None else peaks.flops


def training_flops(model: Any, computed_tokens: int, trained_tokens: int, attention_pairs: int) -> float:
    """Return the FLOPs of one forward and backward pass. Recomputed activations do not count.

    A weight takes 2 FLOPs a token forward, 2 for the gradient of its input, and 2 for its own, if it is trained; of experts, only
    the chosen ones. The head sees the trained tokens only. A head of attention with D values takes 4 D forward, and twice as many
    backward, for each pair of a query and a key that it sees."""
    config = model.config.get_text_config()
    chosen = getattr(config, "num_experts_per_tok", None) or 1
    experts = next((n for name in _NUM_EXPERTS if (n := getattr(config, name, None))), chosen)
    layers = decoder_layers(model)
    flops: float = 0.0
    for layer in layers:
        for name, weight in layer.named_parameters():
            if weight.dim() >= 2:
                part = float(chosen / experts) if ".experts." in f".{name}" else 1.0
                numel = weight.numel() * (2 if weight.dtype == torch.uint8 else 1)  # packed (training/quantize.py)
                flops += part * numel * (6 if weight.requires_grad else 4) * computed_tokens
    head = model.get_output_embeddings().weight
    flops += head.numel() * (6 if head.requires_grad else 4) * trained_tokens
    window = int(getattr(config, "sliding_window", None) or attention_pairs)  # of all layers, where kinds are not told
    in_window = min(attention_pairs, computed_tokens * window)
    for kind in getattr(config, "layer_types", None) or ["sliding_attention"] * len(layers):
        if kind.endswith("attention") and kind != "linear_attention":
            head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
            pairs = in_window if kind == "sliding_attention" else attention_pairs
            flops += 12.0 * int(config.num_attention_heads) * head_dim * pairs
    return flops
