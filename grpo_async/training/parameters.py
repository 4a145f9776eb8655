"""Gathers sharded parameters bucket by bucket, in the dtype of the wire. Every rank takes part in every bucket."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from grpo_async.training.layout import Group, checkpoint_groups, to_checkpoint
from grpo_async.training.sources import list_sources
from grpo_async.weights.buckets import ParameterSpec, cut_into_buckets


class ShardedParameters:
    """The model's parameters under the names and in the form of its Hugging Face checkpoint: tied ones once, adapters merged,
    fused ones taken apart, and the buffers that a checkpoint holds.

    Args:
        model: the Hugging Face model inside the policy, or a peft model around one.
        wire_dtype: dtype in which parameters are sent, as the server serves them. Buffers keep their own.
        device: where buckets are wanted (WeightTransport.device).

    Raises:
        ConfigError: adapters that cannot be merged, or fused parameters that cannot be taken apart.
    """

    def __init__(self, model: Any, *, wire_dtype: torch.dtype, device: torch.device | None = None) -> None:
        self._wire_dtype = wire_dtype
        self._device = device or torch.device("cpu")
        self._model = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._sources = {source.name: source for source in list_sources(model)}
        metas = {
            name: torch.empty(
                source.shape, dtype=source.tensor.dtype if source.is_buffer else wire_dtype, device="meta"
            )
            for name, source in self._sources.items()
        }
        self._groups = checkpoint_groups(self._model, metas)
        self._specs = [
            ParameterSpec(name=name, dtype_name=str(dtype).removeprefix("torch."), shape=shape)
            for group in self._groups
            for name, (shape, dtype) in group.outputs.items()
        ]

    @property
    def specs(self) -> list[ParameterSpec]:
        return self._specs

    def buckets(self, bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
        """Full, contiguous tensors, one bucket at a time, in the order of `specs`. A collective: iterate on every rank.

        Beside the bucket, one group of fused parameters is held as a whole (the experts of one layer).
        """
        tensors = (tensor for group in self._groups for tensor in self._gather(group))
        for bucket in cut_into_buckets(self._specs, bucket_bytes):
            yield [next(tensors) for _ in bucket]

    def _gather(self, group: Group) -> Iterator[torch.Tensor]:
        """The tensors of a group in the order of its outputs."""
        whole = {name: self._cast(self._sources[name].gather(), name) for name in group.sources}
        if group.is_renamed_only:
            parts = dict(zip(group.outputs, whole.values(), strict=True))
        else:
            parts = to_checkpoint(self._model, whole)
        del whole
        for name in group.outputs:
            yield parts.pop(name).to(self._device).contiguous()

    def _cast(self, tensor: torch.Tensor, name: str) -> torch.Tensor:
        """On the device where it was gathered: half the bytes have to leave it."""
        return tensor if self._sources[name].is_buffer else tensor.to(self._wire_dtype)
