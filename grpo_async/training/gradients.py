"""The norm of all gradients, in parts that add up over ranks, and their scaling.

torch's clip_grad_norm_ reduces the norm in a collective of its own and multiplies every gradient, clipped or not. Here a rank gives
its part of the square, which travels with the figures of the update, and the host, which is told the norm anyway, decides.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

_TINY = 1e-6  # as in torch's clip_grad_norm_


@torch.no_grad()
def square_norm(parameters: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """This rank's part of the squared norm of all gradients: the sum over ranks is the whole. () float64 on `device`

    Worked example, gradient [3, 4] sharded over two ranks: 9 and 16; held whole by both: 12.5 and 12.5.
    """
    found = [
        (_copies(parameter.grad), _local(parameter.grad)) for parameter in parameters if parameter.grad is not None
    ]
    total = torch.zeros((), dtype=torch.float64, device=device)
    for (copies, _, _), group in groupby(sorted(found, key=_kind_of), key=_kind_of):
        norms = torch.stack(torch._foreach_norm([gradient for _, gradient in group]))
        total += norms.double().square().sum().to(device) / copies
    return total


@torch.no_grad()
def clip_(parameters: Iterable[torch.Tensor], *, norm: float, max_norm: float) -> None:
    """Scale all gradients by max_norm / (norm + 1e-6) where that is below 1."""
    factor = max_norm / (norm + _TINY)
    gradients = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if factor < 1.0 and gradients:
        torch._foreach_mul_(gradients, factor)


def _kind_of(found: tuple[int, torch.Tensor]) -> tuple[int, str, str]:
    copies, gradient = found
    return copies, str(gradient.device), str(gradient.dtype)


def _copies(gradient: torch.Tensor) -> int:
    """How many ranks hold the same values."""
    if not isinstance(gradient, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    sizes: Sequence[int] = gradient.device_mesh.shape
    copies = 1
    for size, placement in zip(sizes, gradient.placements, strict=True):
        copies *= size if isinstance(placement, Replicate) else 1
    return copies


def _local(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_local() if isinstance(gradient, DTensor) else gradient
