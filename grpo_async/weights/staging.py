"""Where a worker keeps received buckets until the update is finished: on its GPU where there is room, else in host memory."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

logger = logging.getLogger(__name__)

_SPARE_BYTES = 1 << 30  # left free beside the staged copy: loading it needs room for a layer at a time


class Staging:
    """Decides once per update, in `expect`.

    Args:
        device: of the worker's model.
        free_bytes: memory of `device` that is free now.
    """

    def __init__(self, device: torch.device, *, free_bytes: Callable[[], int] | None = None) -> None:
        self._device = device
        self._free_bytes = free_bytes or (lambda: free_cuda_bytes(device))
        self.on_device = True

    def expect(self, num_bytes: int) -> None:
        """An update of `num_bytes` follows."""
        free = self._free_bytes()
        self.on_device = num_bytes + _SPARE_BYTES <= free
        logger.info(
            "staging %.0f MiB of new weights in %s: %.0f MiB of %s are free",
            num_bytes / 2**20,
            "its memory" if self.on_device else "host memory",
            free / 2**20,
            self._device,
        )

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Fresh memory for a bucket that is to stay, [num_bytes] uint8."""
        if self.on_device:
            return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def keep(self, bucket: torch.Tensor) -> torch.Tensor:
        """A copy of `bucket` that stays, [num_bytes] uint8; `bucket` may be reused when this returns."""
        kept = self.allocate(bucket.numel())
        kept.copy_(bucket)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return kept


def free_cuda_bytes(device: torch.device) -> int:
    """Memory of a GPU that this process can still get: what the driver has, and what torch has cached."""
    free, _ = torch.cuda.mem_get_info(device)
    return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
