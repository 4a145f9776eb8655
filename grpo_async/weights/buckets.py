"""Parameters on the wire: how they are cut into buckets, packed and unpacked, and whether an update fits what a server serves.

Trainer and server both apply these rules. Worked example: three float32 parameters of 100, 120 and 300 bytes with bucket_bytes
320 -> [[100, 120], [300]]. A parameter of half a bucket or more is a separate bucket.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from grpo_async.config.sections import WeightsSection

DTYPE_NAMES = (
    "float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""Of torch's, those on the wire: parameters are floats, buffers of a checkpoint may be anything."""

_MIN_BUCKET_BYTES = 8 << 20
_FREE_FRACTION = 8  # trainer and server each hold a bucket on its way and the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """Name, dtype and shape of one parameter on the wire."""

    name: str
    dtype_name: str
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype_name)
        return dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def choose_bucket_bytes(settings: WeightsSection, num_bytes: int, *, device: torch.device) -> int:
    """Size of the buckets of an update of `num_bytes`: see `WeightsSection.bucket_bytes`; where the user has not set it, at most an
    eighth of what is free on the trainer's GPU (as the driver says: what torch has cached may be in pieces)."""
    wanted = settings.bucket_bytes(num_bytes)
    if settings.bucket_mb is not None or device.type != "cuda":
        return wanted
    free, _ = torch.cuda.mem_get_info(device)
    return min(wanted, max(free // _FREE_FRACTION, _MIN_BUCKET_BYTES))


def cut_into_buckets(specs: Iterable[ParameterSpec], bucket_bytes: int) -> Iterator[Sequence[ParameterSpec]]:
    """Yield consecutive runs of `specs` of at most `bucket_bytes` bytes each, never splitting a parameter. One of half a bucket or
    more is a separate bucket, which needs no packing."""
    bucket: list[ParameterSpec] = []
    size = 0
    for spec in specs:
        is_large = 2 * spec.num_bytes >= bucket_bytes
        if bucket and (is_large or size + spec.num_bytes > bucket_bytes):
            yield bucket
            bucket, size = [], 0
        if is_large:
            yield [spec]
            continue
        bucket.append(spec)
        size += spec.num_bytes
    if bucket:
        yield bucket


def pack(tensors: Sequence[torch.Tensor], into: torch.Tensor) -> torch.Tensor:
    """Concatenate the bytes of contiguous tensors, of any shape, in `into`: [num_bytes] uint8, also on another device."""
    offset = 0
    for tensor in tensors:
        part = tensor.reshape(-1).view(torch.uint8)
        into[offset : offset + part.numel()].copy_(part)
        offset += part.numel()
    assert offset == into.numel(), f"{offset} bytes for a buffer of {into.numel()}"
    return into


def unpack(buffer: torch.Tensor, specs: Sequence[ParameterSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Cut a received bucket back into named tensors; inverse of `pack`. Views of `buffer` where alignment allows."""
    offset = 0
    for spec in specs:
        part = buffer[offset : offset + spec.num_bytes]
        if part.storage_offset() % spec.dtype.itemsize:  # a view of another dtype needs an aligned start
            part = part.clone()
        yield spec.name, part.view(spec.dtype).view(spec.shape)
        offset += spec.num_bytes


def check_names(
    specs: Sequence[ParameterSpec], served_shapes: Mapping[str, Sequence[int]], optional: Collection[str] = ()
) -> list[str]:
    """One sentence per difference; [] when the update fits, or when the server does not know its parameters. A part of a model is
    refused too: vLLM fuses layers (q, k, v), and a fused layer that gets one part only computes garbage.

    Args:
        specs: what is sent.
        served_shapes: name -> shape of what the server wants, empty when it cannot know (api.ServedParameters).
        optional: names that may be sent or not (a head that is tied to the embeddings).

    Worked example: served {"a": (2, 3), "b": (4,)}, sent a with shape (2, 2)
    -> "a has the shape [2, 2], the server's [2, 3]", "b is missing".
    """
    if not served_shapes:
        return []
    problems = []
    seen: set[str] = set()
    for spec in specs:
        if spec.name in seen:
            problems.append(f"{spec.name} is sent twice")
            continue
        seen.add(spec.name)
        if spec.name not in served_shapes:
            if spec.name not in optional:
                problems.append(f"{spec.name} is not a parameter of the served model")
        elif list(spec.shape) != list(served_shapes[spec.name]):
            problems.append(
                f"{spec.name} has the shape {list(spec.shape)}, the server's {list(served_shapes[spec.name])}"
            )
    problems.extend(f"{name} is missing" for name in served_shapes if name not in seen and name not in optional)
    return problems
