"""Cuts a list of parameters into buckets, by one rule that trainer and server both apply. Pure; needs no tensor.

Worked example: three float32 parameters of 100, 200 and 300 bytes with bucket_bytes 320 -> [[100, 200], [300]].
A parameter larger than a bucket, or than 4 MiB, is a bucket of its own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

ITEM_SIZES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip
"""Bytes of an element by the name of its dtype: parameters are floats, buffers of a checkpoint may be anything."""


LARGE_BYTES = 1 << 22
"""From so many bytes on a parameter is a bucket of its own: its memory can be sent as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """Name, dtype and shape of one parameter on the wire."""

    name: str
    dtype_name: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_SIZES[self.dtype_name]


def cut_into_buckets(specs: Iterable[ParameterSpec], bucket_bytes: int) -> Iterator[Sequence[ParameterSpec]]:
    """Yield consecutive runs of `specs` of at most `bucket_bytes` bytes each, never splitting a parameter. A large one is a bucket
    of its own, which needs no packing."""
    bucket: list[ParameterSpec] = []
    size = 0
    for spec in specs:
        is_large = spec.num_bytes >= LARGE_BYTES
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
