"""Parameters in transit: how they are divided into buckets, packed, unpacked and proven to arrive, and whether an update fits a
server's model.

Float32 parameters of 100, 120 and 300 bytes, bucket_bytes 320 -> [[100, 120], [300]]."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from grpo_async.config.sections import WeightsSection
from grpo_async.inference.api import AdapterBase, ServedParameters
from grpo_async.utils.text import duplicates

DTYPE_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2", "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool",
}  # fmt: skip
"""Dtypes that can be sent, by their names in safetensors: parameters are floats, buffers of a checkpoint may have any dtype."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
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
    """`WeightsSection.bucket_bytes` for the free memory of the trainer's GPU (according to the driver: memory that torch has cached
    may be fragmented)."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
    return settings.bucket_bytes(num_bytes, free_bytes=free)


def cut_into_buckets(specs: Iterable[ParameterSpec], bucket_bytes: int) -> Iterator[Sequence[ParameterSpec]]:
    """Yield consecutive runs of `specs` of at most `bucket_bytes` bytes each, never splitting a parameter. A parameter of half a
    bucket or more, however large, is a separate bucket, which needs no packing."""
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


def update_buckets(specs: Sequence[ParameterSpec], bucket_bytes: int) -> list[Sequence[ParameterSpec]]:
    """All buckets of an update, the last of which has the digests."""
    return [*cut_into_buckets(specs, bucket_bytes), [digests_spec(len(specs))]]


def pack(tensors: Sequence[torch.Tensor], into: torch.Tensor) -> torch.Tensor:
    """Concatenate the bytes of contiguous tensors, of any shape, into `into`: [num_bytes] uint8, which may be on another device."""
    offset = 0
    for tensor in tensors:
        part = tensor.reshape(-1).view(torch.uint8)
        into[offset : offset + part.numel()].copy_(part)
        offset += part.numel()
    assert offset == into.numel(), f"{offset} bytes for a buffer of {into.numel()}"
    return into


def unpack(buffer: torch.Tensor, specs: Sequence[ParameterSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Split a received bucket into named tensors; inverse of `pack`. They are views of `buffer` if alignment allows."""
    offset = 0
    for spec in specs:
        part = buffer[offset : offset + spec.num_bytes]
        if part.storage_offset() % spec.dtype.itemsize:  # a view of another dtype needs an aligned start
            part = part.clone()
        yield spec.name, part.view(spec.dtype).view(spec.shape)
        offset += spec.num_bytes


_LINES, _LINE_BYTES = 64, 64
"""Sampled from each tensor, all of one that has no more. Whole cache lines: reading one byte costs as much."""


def samples_of(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Lines at equal distances of each contiguous tensor, a smaller one with zeros at its end. The device is not waited for.
    [len(tensors), _LINES, _LINE_BYTES] uint8"""
    samples = []
    for tensor in tensors:
        content = tensor.reshape(-1).view(torch.uint8)
        num_lines = len(content) // _LINE_BYTES
        if num_lines < _LINES:
            content, num_lines = pad(content, (0, _LINES * _LINE_BYTES - len(content))), _LINES
        lines = content[: num_lines * _LINE_BYTES].view(num_lines, _LINE_BYTES)
        samples.append(lines[:: num_lines // _LINES][:_LINES])
    return torch.stack(samples)


def digests_of(samples: Sequence[torch.Tensor]) -> torch.Tensor:
    """A digest of each sample, which changes with any bit or its place. [number of tensors] int64"""
    words = torch.cat(list(samples)).flatten(1).view(torch.int64)
    return (words * torch.arange(1, 2 * words.shape[1], 2, device=words.device)).sum(1)


def digests_spec(num_tensors: int) -> ParameterSpec:
    """The last bucket of an update: the digests of all that was sent before."""
    return ParameterSpec(name="digests", dtype_name="int64", shape=(num_tensors,))


def with_digests(buckets: Iterable[Sequence[torch.Tensor]]) -> Iterator[Sequence[torch.Tensor]]:
    """Yield the buckets of an update, each sampled before it is packed, then that of `digests_spec`."""
    samples = []
    for tensors in buckets:
        samples.append(samples_of(tensors))
        yield tensors
    yield [digests_of(samples)]


def update_problems(
    specs: Sequence[ParameterSpec], served_shapes: Mapping[str, Sequence[int]], optional: Collection[str] = ()
) -> list[str]:
    """One sentence per difference; [] if the update fits, or if the server does not know its parameters (`served_shapes` empty).
    Part of a model is also refused: vLLM fuses layers (q, k, v), and one that gets only one part computes garbage.

    Served {"a": (2, 3), "b": (4,)}, sent a with shape (2, 2) -> "a has the shape [2, 2], the server's [2, 3]", "b is missing".
    """
    if not served_shapes:
        return []
    sent = {spec.name: spec for spec in specs}
    problems = [f"{name} is sent twice" for name in duplicates(spec.name for spec in specs)]
    for spec in sent.values():
        if spec.name not in served_shapes:
            if spec.name not in optional:
                problems.append(f"{spec.name} is not a parameter of the served model")
        elif list(spec.shape) != list(served_shapes[spec.name]):
            problems.append(
                f"{spec.name} has the shape {list(spec.shape)}, the server's {list(served_shapes[spec.name])}"
            )
    problems.extend(f"{name} is missing" for name in served_shapes if name not in sent and name not in optional)
    return problems


def wrong_kind(served: ServedParameters) -> str:
    """Why a server refuses updates of the other kind."""
    kind = (
        "adapters that it keeps beside its weights, and no"
        if served.swaps_adapters
        else "no adapters beside its weights, only"
    )
    return f"it was started to take {kind} merged weights: start it with the model.lora.push of the run"


class GatheredParameters(ABC):
    """What a push sends: parameters of the policy, gathered bucket by bucket; every rank iterates in lockstep. See
    training.parameters."""

    specs: list[ParameterSpec]
    base: AdapterBase | None = None
    """The base to which the servers add adapters. None: whole parameters are sent."""
    swap: bool = False
    """The servers keep the adapters beside their weights, and go on generating."""

    @abstractmethod
    def gather(self) -> Iterator[torch.Tensor]:
        """Whole, contiguous tensors in the order of `specs`. A collective: iterate on every rank."""

    def problems(self, served: ServedParameters) -> list[str]:
        """Why a server cannot take part."""
        if self.swap != served.swaps_adapters:
            return [wrong_kind(served)]
        return self.differences(served)

    def differences(self, served: ServedParameters) -> list[str]:
        """What the server has and these parameters lack, or the other way round."""
        return update_problems(self.specs, served.shapes, served.optional)

    def buckets(self, bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
        tensors = self.gather()
        for bucket in cut_into_buckets(self.specs, bucket_bytes):
            yield [next(tensors) for _ in bucket]
        next(tensors, None)  # what it checks at its end
