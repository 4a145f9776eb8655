"""What GPUs can do, from the data sheets of their makers."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """FLOP/s of dense 16-bit products, and bytes/s of the memory."""

    flops: float
    memory: float


# (pattern of torch's device name, dense bfloat16 TFLOP/s, memory GB/s); the first match counts
_DEVICES = (
    (r"B300", 2250, 8000),
    (r"B200", 2250, 8000),
    (r"H200", 989, 4800),
    (r"H100.*PCIe", 756, 2000),
    (r"H100|GH200", 989, 3350),
    (r"H800", 989, 3350),
    (r"H20\b", 148, 4000),
    (r"A100.*80GB", 312, 2039),
    (r"A100|A800", 312, 1555),
    (r"MI300X", 1307, 5300),
    (r"MI325X", 1307, 6000),
    (r"L40S", 362, 864),
    (r"\bL4\b", 121, 300),
    (r"A10G?\b", 125, 600),
    (r"RTX 5090", 209, 1792),
    (r"RTX 4090", 165, 1008),
    (r"RTX 3090", 71, 936),
)


def listed_peaks(device_name: str) -> Peaks | None:
    """Return the peaks of a device; None if it is not listed."""
    for pattern, tflops, memory in _DEVICES:
        if re.search(pattern, device_name):
            return Peaks(flops=tflops * 1e12, memory=memory * 1e9)
    return None
