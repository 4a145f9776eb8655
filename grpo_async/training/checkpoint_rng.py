"""Random number generators of one rank: python, numpy (if it is loaded), torch on the CPU and on this rank's GPU; as JSON."""

from __future__ import annotations

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def rng_state() -> dict[str, Any]:
    """The state of every generator of this process."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "torch": _text(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    if "numpy" in sys.modules:
        name, keys, position, has_gauss, cached = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)]
    return state


def restore_rng(state: Mapping[str, Any]) -> None:
    """Set every generator that `state` knows and this process has.

    Raises:
        ValueError, KeyError, TypeError, RuntimeError: this is not what `rng_state` returned.
    """
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(_tensor(state["torch"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))
    if "numpy" in state and "numpy" in sys.modules:
        numpy = sys.modules["numpy"]
        name, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))


def seed_rng(seed: int) -> None:
    """Begin every generator at a seed, for a rank that a checkpoint knows nothing of."""
    random.seed(seed)
    torch.manual_seed(seed)  # those of all GPUs too
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed & 0xFFFFFFFF)


def _text(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.numpy().tobytes()).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
