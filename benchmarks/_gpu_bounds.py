"""What a model and a machine allow at most: FLOPs, bytes, and the seconds that they take at the machine's peaks (a roofline)."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSize:
    """A dense decoder with grouped-query attention, a gated MLP and tied embeddings (Qwen3)."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    @property
    def num_parameters(self) -> int:
        """Of matrices; the norms' are some thousands. Formula: layers x (2 H A + 2 H K + 3 H I) + V H, with H hidden,
        A = heads x head_dim, K = kv_heads x head_dim, I intermediate. The embedding is counted once: looking a
        token up computes nothing, the head does."""
        attention = 2 * self.hidden * self.head_dim * (self.heads + self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocab * self.hidden

    def forward_flops(self, context: float) -> float:
        """Of one token that attends to `context` tokens: 2 N + 4 L A context (two products of A values with each of them)."""
        return 2.0 * self.num_parameters + 4.0 * self.layers * self.heads * self.head_dim * context

    def training_flops(self, length: float) -> float:
        """Of one token of a sample of `length` tokens, forward and backward: 6 N + 6 L A (length + 1), causal: a token attends to
        (length + 1) / 2 on average, and backward is twice forward. What is computed again (checkpointing) does not count."""
        return 3.0 * self.forward_flops((length + 1) / 2)

    def kv_bytes(self, itemsize: int) -> int:
        """Of one token: 2 L K values."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


SIZES = {
    "tiny": ModelSize(vocab=512, hidden=64, layers=2, heads=2, kv_heads=1, head_dim=32, intermediate=192),
    "0.6b": ModelSize(vocab=151936, hidden=1024, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=3072),
    "1.7b": ModelSize(vocab=151936, hidden=2048, layers=28, heads=16, kv_heads=8, head_dim=128, intermediate=6144),
    "8b": ModelSize(vocab=151936, hidden=4096, layers=36, heads=32, kv_heads=8, head_dim=128, intermediate=12288),
}
"""Widths of Qwen3 models (the 8B's own head is not tied: here it is)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """FLOPs/s of dense products in the compute dtype, bytes/s of the memory, and where the figures come from."""

    flops: float
    memory: float
    source: str


_GB = 1e9
# (name as torch says it, dense bfloat16 TFLOPS, memory GB/s): the makers' data sheets; the first that matches counts
_TABLE: tuple[tuple[str, float, float], ...] = (
    (r"B200", 2250, 8000),
    (r"H200", 989, 4800),
    (r"H100.*NVL", 835, 3900),
    (r"H100.*PCIe", 756, 2000),
    (r"H100|GH200", 989, 3350),
    (r"A100.*80GB", 312, 2039),
    (r"A100", 312, 1555),
    (r"L40S", 362, 864),
    (r"\bL4\b", 121, 300),
    (r"A10G?\b", 125, 600),
    (r"RTX 4090", 165, 1008),
)


def listed_peaks(device_name: str) -> Peaks | None:
    """Of the table; None: it does not know the device."""
    for pattern, tflops, memory in _TABLE:
        if re.search(pattern, device_name):
            return Peaks(flops=tflops * 1e12, memory=memory * _GB, source="data sheet")
    return None


def measured_peaks(device: str, dtype: str) -> Peaks:
    """The best of some runs of one large product and of one large copy, on all cores: what the machine itself has shown. Work on
    fewer threads stays further below it."""
    import torch

    size, megabytes = (4096, 1024) if device == "cuda" else (1024, 64)
    left = torch.randn(size, size, dtype=getattr(torch, dtype), device=device)
    source = torch.zeros(megabytes << 20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    product_s = _best_s(lambda: left @ left, device)
    copy_s = _best_s(lambda: target.copy_(source), device)
    memory = 2 * source.nbytes / copy_s  # read and written
    return Peaks(flops=2 * size**3 / product_s, memory=memory, source="measured here")


def _best_s(work: Any, device: str, times: int = 5) -> float:
    import torch

    seconds = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return min(seconds[1:])  # the first warms up


def generation_bound_s(
    size: ModelSize, peaks: Peaks, *, in_flight: int, prompt: int, completion: int, itemsize: int
) -> float:
    """Seconds in which `in_flight` completions can come at the earliest: the prompts at the peak of FLOPs, then `completion` steps,
    each of which reads all weights once and the KV of all, or computes, whichever takes longer.

    Worked example: N = 1e9 in 16 bit, 1 in flight, 1e12 bytes/s: 2 ms a token, 500 tokens/s at most; with 8 in flight 4000.
    """
    prefill = in_flight * prompt * size.forward_flops(prompt / 2) / peaks.flops
    context = prompt + completion / 2
    num_bytes = size.num_parameters * itemsize + in_flight * context * size.kv_bytes(itemsize)
    flops = in_flight * size.forward_flops(context)
    return prefill + completion * max(num_bytes / peaks.memory, flops / peaks.flops)
