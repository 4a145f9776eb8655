"""The most memory that a trainer rank has taken so far, as its device or the kernel counted it."""

from __future__ import annotations

import resource
import sys

import torch

_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


def peak_bytes(device: torch.device) -> int:
    """Of the GPU what PyTorch has allocated at once; on a CPU the resident memory of the process, its libraries included."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
