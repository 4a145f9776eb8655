"""Buckets as bytes: many tensors in one uint8 tensor, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from grpo_async.weights.buckets import ParameterSpec


def pack(tensors: Sequence[torch.Tensor], into: torch.Tensor | None = None) -> torch.Tensor:
    """Concatenate the bytes of contiguous tensors into one uint8 tensor. Shapes: any -> [num_bytes].

    Args:
        into: where to, [num_bytes] uint8, also on another device; None: fresh memory on the tensors' device.
    """
    parts = [tensor.reshape(-1).view(torch.uint8) for tensor in tensors]
    if into is None:
        return torch.cat(parts)
    offset = 0
    for part in parts:
        into[offset : offset + part.numel()].copy_(part)
        offset += part.numel()
    assert offset == into.numel(), f"{offset} bytes for a buffer of {into.numel()}"
    return into


def unpack(buffer: torch.Tensor, specs: Sequence[ParameterSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Cut a received bucket back into named tensors; inverse of `pack`. Views of `buffer` where alignment allows."""
    offset = 0
    for spec in specs:
        part = buffer[offset : offset + spec.num_bytes]
        dtype: torch.dtype = getattr(torch, spec.dtype_name)
        if part.storage_offset() % dtype.itemsize:  # a view of another dtype needs an aligned start
            part = part.clone()
        yield spec.name, part.view(dtype).view(spec.shape)
        offset += spec.num_bytes


class TurnBuffers:
    """Two buffers that take turns: one is filled while the other is being sent. They grow to the largest bucket.

    Args:
        device: where they are. Host buffers are pinned where there is a GPU to copy from.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._turn = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """The buffer whose turn it is, [num_bytes] uint8; what it held is lost."""
        self._turn = 1 - self._turn
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < num_bytes:
            pinned = self._device.type == "cpu" and torch.cuda.is_available()
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device, pin_memory=pinned)
            self._buffers[self._turn] = buffer
        return buffer[:num_bytes]
