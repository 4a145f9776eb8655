"""Gathers sharded parameters bucket by bucket, in the dtype of the wire. Every rank takes part in every bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from grpo_async.weights.buckets import ParameterSpec, cut_into_buckets


class ShardedParameters:
    """The model's parameters under the names of its Hugging Face checkpoint; tied parameters appear once.

    Args:
        model: the Hugging Face model inside the policy.
        wire_dtype: dtype in which parameters are sent, as the server serves them.
    """

    def __init__(self, model: Any, *, wire_dtype: torch.dtype) -> None:
        self._parameters = dict(model.named_parameters())
        self._wire_dtype = wire_dtype
        self._specs = [
            ParameterSpec(name=name, dtype_name=str(wire_dtype).removeprefix("torch."), shape=tuple(parameter.shape))
            for name, parameter in self._parameters.items()
        ]

    @property
    def specs(self) -> list[ParameterSpec]:
        return self._specs

    def buckets(self, bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
        """Full, contiguous CPU tensors, one bucket at a time, in the order of `specs`. A collective: iterate on every rank."""
        for bucket in cut_into_buckets(self._specs, bucket_bytes):
            yield [self._gather(spec.name) for spec in bucket]

    def _gather(self, name: str) -> torch.Tensor:
        parameter = self._parameters[name].detach()
        full: torch.Tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        return full.to(dtype=self._wire_dtype).cpu().contiguous()
