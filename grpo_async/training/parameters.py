"""What a push sends, gathered bucket by bucket: whole parameters, or the factors of adapters alone.

Gathers sharded parameters in the dtype of the wire. Every rank takes part in every bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from grpo_async.config.model_sections import ModelSection
from grpo_async.errors import ConfigError
from grpo_async.inference.surface import ServedParameters
from grpo_async.training.layout import Group, checkpoint_groups, to_checkpoint
from grpo_async.training.sources import Product, Source, list_sources
from grpo_async.weights.adapters import LEFT, RIGHT, BaseWeights, problems_with_base
from grpo_async.weights.buckets import ITEM_SIZES, ParameterSpec, cut_into_buckets
from grpo_async.weights.names import check_names


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

    base: dict[str, str] | None = None
    """Fields of surface.AdapterBase; None: what is sent is whole."""

    def problems(self, served: ServedParameters) -> list[str]:
        """Why a server cannot take these parameters; [] when it can."""
        return check_names(self._specs, served.shapes, served.optional)

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


class AdapterParameters:
    """The factors of each adapted weight; see weights.adapters. Offers what ShardedParameters does.

    Args:
        model: the Hugging Face model inside the policy, with adapters.
        path: `model.path`, where servers find the base.
        served_dtype: dtype in which the merged weights are served.
        device: where buckets are wanted.

    Raises:
        ConfigError: adapters or a base that servers cannot put together.
    """

    def __init__(self, model: Any, *, path: str, served_dtype: torch.dtype, device: torch.device | None = None) -> None:
        self._device = device or torch.device("cpu")
        self._path = path
        base = BaseWeights(path)
        self.base: dict[str, str] | None = {
            "digest": base.digest, "dtype_name": str(served_dtype).removeprefix("torch.")
        }  # fmt: skip
        sources = {source.name: source for source in list_sources(model)}
        self._products: dict[str, Product] = {}
        metas = {name: torch.empty(source.shape, device="meta") for name, source in sources.items()}
        for group in checkpoint_groups(model, metas):
            for name in group.sources:
                if sources[name].changes:
                    target = next(iter(group.outputs))
                    self._products[target] = _only_product(sources[name], group, base)
        if not self._products:
            raise ConfigError("model.lora.push: adapter needs adapters, and the model has none; set model.lora")
        self._specs = [spec for name, product in self._products.items() for spec in _factor_specs(name, product)]

    @property
    def specs(self) -> list[ParameterSpec]:
        return self._specs

    def problems(self, served: ServedParameters) -> list[str]:
        """Why a server cannot take these adapters; [] when it can."""
        assert self.base is not None
        return problems_with_base(self.base["digest"], served.base_digest, self._path)

    def buckets(self, bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
        """As ShardedParameters.buckets. A collective."""
        tensors = (
            factor.to(self._device).contiguous() for product in self._products.values() for factor in product.factors()
        )
        for bucket in cut_into_buckets(self._specs, bucket_bytes):
            yield [next(tensors) for _ in bucket]


def choose_parameters(
    model: Any, section: ModelSection, *, served_dtype: torch.dtype, device: torch.device
) -> ShardedParameters | AdapterParameters:
    """What `model.lora.push` says is sent."""
    if section.lora is not None and section.lora.push == "adapter":
        return AdapterParameters(model, path=section.path, served_dtype=served_dtype, device=device)
    return ShardedParameters(model, wire_dtype=served_dtype, device=device)


def _only_product(source: Source, group: Group, base: BaseWeights) -> Product:
    target = next(iter(group.outputs))
    product = source.changes[0]
    if len(source.changes) != 1 or not isinstance(product, Product) or not group.is_renamed_only:
        raise ConfigError(
            f"model.lora.push: adapter needs one plain adapter at each weight, {source.name} has other ones; set merged"
        )
    spec = base.files.specs.get(target)
    if spec is None:
        raise ConfigError(f"model.lora.push: the files of model.path have no {target} to add an adapter to; set merged")
    if source.packed_columns is not None or source.tensor.dtype.itemsize < ITEM_SIZES[spec.dtype_name]:
        raise ConfigError(
            f"model.lora.push: adapter: servers add to {target} as the files hold it ({spec.dtype_name}), the trainer has it "
            "rounded; set merged"
        )
    return product


def _factor_specs(name: str, product: Product) -> Iterator[ParameterSpec]:
    rank = product.b.shape[1]
    rows, columns = product.b.shape[0], product.a.shape[1]
    if product.is_transposed:
        rows, columns = columns, rows
    yield ParameterSpec(name=name + LEFT, dtype_name="float32", shape=(rows, rank))
    yield ParameterSpec(name=name + RIGHT, dtype_name="float32", shape=(rank, columns))
