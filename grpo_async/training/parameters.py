"""The tensors of a model: how they are sharded, what form they have in its checkpoint, and which ones a push sends.

    list_sources        tied ones once, adapters merged, persistent buffers; gathered from shards only on request
    checkpoint_groups   transformers 5 fuses some parameters when it loads (the experts of a mixture): they are split for a push
    ShardedParameters, AdapterParameters    gathered bucket by bucket in the dtype that is sent; every rank takes part

2 experts: layers.0.mlp.experts.gate_up_proj (2, 2 x 8, 16) -> experts.0.gate_proj.weight, experts.0.up_proj.weight, ..., each
(8, 16). LoRA (arXiv 2106.09685): W' = W + scaling x B A, in float32, even if W is kept in bfloat16."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from grpo_async.config.sections import ModelSection
from grpo_async.errors import ConfigError
from grpo_async.inference.api import AdapterBase, ServedParameters
from grpo_async.training.quantize import Linear4Bit
from grpo_async.utils.text import dtype_name, shortlist
from grpo_async.weights.adapters import LORA_A, LORA_B, BaseWeights, problems_with_base
from grpo_async.weights.buckets import GatheredParameters, ParameterSpec

_COMPARED = 64
"""Elements of a gathered tensor that are compared with this rank's own."""
ADAPTER = "default"
"""peft's name of our only adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraDelta:
    """scaling x B A of an adapter, B of shape (M, r) and A of shape (r, N)."""

    a: torch.Tensor
    b: torch.Tensor
    scaling: float

    def factors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(scaling x B, A), float32, whole. A collective."""
        return whole_of(self.b).float() * self.scaling, whole_of(self.a).float()


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedTensor:
    """A parameter or buffer under its name without adapters."""

    name: str
    tensor: torch.Tensor
    is_buffer: bool = False
    delta: LoraDelta | None = None
    """What its adapter adds to it, if it has one."""
    in_4_bits: Linear4Bit | None = None
    """The layer whose packed weights `tensor` are."""

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape) if self.in_4_bits is None else self.in_4_bits.whole_shape

    def gather(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The whole tensor with its adapter, on the device of the shards. A collective. Shards without an adapter are cast to
        `dtype` before they are gathered: half the bytes for 16 bits. None: the dtype of the tensor; float32 with an adapter."""
        tensor = self.tensor.detach() if self.in_4_bits is None else self.in_4_bits.whole()
        if self.delta is None:
            return whole_of(tensor if dtype is None else tensor.to(dtype))
        full = torch.addmm(whole_of(tensor).float(), *self.delta.factors())
        return full if dtype is None else full.to(dtype)


def list_sources(model: Any) -> list[NamedTensor]:
    ignored = set(getattr(model, "_keys_to_ignore_on_save", None) or ())
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())  # names that a checkpoint omits
    by_tensor: dict[int, list[NamedTensor]] = {}
    for source in _walk(model, ""):
        if source.name not in ignored:
            by_tensor.setdefault(id(source.tensor), []).append(source)
    return [next((each for each in shared if each.name not in tied), shared[0]) for shared in by_tensor.values()]


def _walk(module: Any, prefix: str) -> Iterator[NamedTensor]:
    """A module's own tensors, then those of its children; for an adapted layer, those of its base layer with the adapter's
    delta."""
    if hasattr(module, "lora_A"):
        for source in _walk(module.get_base_layer(), prefix):
            if source.name == f"{prefix}.weight":
                a, b = module.lora_A[ADAPTER].weight, module.lora_B[ADAPTER].weight
                source = replace(source, delta=LoraDelta(a=a, b=b, scaling=module.scaling[ADAPTER]))
            yield source
        return
    dot = f"{prefix}." if prefix else ""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            packed = module if name == "weight" and isinstance(module, Linear4Bit) else None
            yield NamedTensor(name=f"{dot}{name}", tensor=parameter, in_4_bits=packed)
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield NamedTensor(name=f"{dot}{name}", tensor=buffer, is_buffer=True)
    for name, child in module.named_children():
        yield from _walk(child, f"{dot}{name}")


def local_of(tensor: Any) -> torch.Tensor:
    """This rank's shard; an unsharded tensor is returned as it is."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, without gradient. A collective if it is sharded."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor
    # a shard that is offloaded to the host would be gathered over gloo
    whole: torch.Tensor = tensor.to(tensor.device_mesh.device_type).full_tensor()
    return whole


def is_leader() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def num_ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedTensors:
    """Tensors in memory that belong together, and their form in the checkpoint: name -> (shape, dtype)."""

    sources: tuple[str, ...]
    outputs: Shapes
    is_renamed_only: bool
    """The group is one tensor, which the checkpoint has unchanged, perhaps under another name."""


def checkpoint_groups(model: Any, sources: Mapping[str, torch.Tensor]) -> list[FusedTensors]:
    """Groups in the order of `sources` (by name, tensors on "meta"), each as small as possible."""
    try:
        everything = _shapes(to_checkpoint(model, sources))
    except Exception as error:  # transformers may raise anything for a model that it cannot save
        raise ConfigError(
            f"transformers cannot convert {type(model).__name__} to the format of its checkpoint: {error}"
        ) from error
    groups: dict[str, FusedTensors] = {}
    rest = list(sources)
    for key in (lambda name: name, _module_of, _layer_of, lambda _: ""):
        rest = _group(model, sources, rest, key, everything, groups)
    missing = everything.keys() - {name for group in groups.values() for name in group.outputs}
    if missing or rest:
        raise ConfigError(
            f"{type(model).__name__} cannot be sent in parts: {shortlist(sorted(missing) or rest, ', ')} "
            "depend on tensors all over the model"
        )
    return [groups[name] for name in sources if name in groups]


def to_checkpoint(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Names and form in the checkpoint of tensors of `model`, as `save_pretrained` writes them."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted


def _group(
    model: Any,
    sources: Mapping[str, torch.Tensor],
    names: Sequence[str],
    key: Callable[[str], str],
    everything: Shapes,
    groups: dict[str, FusedTensors],
) -> list[str]:
    """Add the groups by `key` that give what the whole model gives, under the name of their first tensor; returns the rest."""
    by_key: dict[str, list[str]] = {}
    for name in names:
        by_key.setdefault(key(name), []).append(name)
    rest = []
    for members in by_key.values():
        try:
            converted = to_checkpoint(model, {name: sources[name] for name in members})
        except Exception:  # noqa: BLE001 - an incomplete group cannot be converted: a larger one is tried
            rest.extend(members)
            continue
        outputs = _shapes(converted)
        if not outputs or any(everything.get(name) != shape for name, shape in outputs.items()):
            rest.extend(members)
            continue
        untouched = len(members) == 1 and next(iter(converted.values())) is sources[members[0]]
        groups[members[0]] = FusedTensors(
            sources=tuple(members), outputs=outputs, is_renamed_only=len(outputs) == 1 and untouched
        )
    return rest


def _shapes(tensors: Mapping[str, torch.Tensor]) -> Shapes:
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]


def _layer_of(name: str) -> str:
    match = re.match(r".*?\.\d+(?=\.)", name)
    return match.group() if match else ""


class ShardedParameters(GatheredParameters):
    """The model's parameters under the names and in the form of its Hugging Face checkpoint: tied ones once, adapters merged,
    fused ones split, and the buffers, which keep their dtype. Besides the bucket, `buckets` holds one group of fused parameters.
    """

    def __init__(self, model: Any, *, wire_dtype: torch.dtype, device: torch.device | None = None) -> None:
        self._wire_dtype = wire_dtype
        self._device = device or torch.device("cpu")
        self._model = model
        self._sources = {source.name: source for source in list_sources(model)}
        metas = {
            name: torch.empty(
                source.shape, dtype=source.tensor.dtype if source.is_buffer else wire_dtype, device="meta"
            )
            for name, source in self._sources.items()
        }
        self._groups = checkpoint_groups(self._model, metas)
        self.specs = [
            ParameterSpec(name=name, dtype_name=dtype_name(dtype), shape=shape)
            for group in self._groups
            for name, (shape, dtype) in group.outputs.items()
        ]

    def gather(self) -> Iterator[torch.Tensor]:
        """Rank 0, whose shards begin where the whole does, compares what is gathered with them. Raises RuntimeError at the end."""
        compared: dict[str, torch.Tensor] = {}
        for group in self._groups:
            whole = {}
            for name in group.sources:
                source = self._sources[name]
                whole[name] = source.gather(None if source.is_buffer else self._wire_dtype)
                if source.delta is None and source.in_4_bits is None and is_leader():
                    own = local_of(source.tensor).detach().reshape(-1)[:_COMPARED].to(whole[name])
                    compared[name] = (
                        own.view(torch.uint8) != whole[name].reshape(-1)[: len(own)].view(torch.uint8)
                    ).any()
            if group.is_renamed_only:
                parts = dict(zip(group.outputs, whole.values(), strict=True))
            else:
                parts = to_checkpoint(self._model, whole)
            del whole
            for name in group.outputs:
                yield parts.pop(name).to(self._device).contiguous()
        if compared and (wrong := torch.stack(list(compared.values())).nonzero().flatten().tolist()):
            names = shortlist([list(compared)[number] for number in wrong], ", ")
            raise RuntimeError(f"what was gathered to be pushed is not what this rank holds of {names}")


class AdapterParameters(GatheredParameters):
    """The factors of each adapted weight; see weights.adapters. `section`: of the model, with the base of the adapters."""

    def __init__(
        self, model: Any, section: ModelSection, *, served_dtype: torch.dtype, device: torch.device | None = None
    ) -> None:
        self._device = device or torch.device("cpu")
        self._path = section.path
        self.swap = swap = section.lora is not None and section.lora.push == "adapter_swap"
        files = BaseWeights(section.path, revision=section.revision)
        self.base: AdapterBase = AdapterBase(digest=files.digest, dtype_name=dtype_name(served_dtype))
        sources = {source.name: source for source in list_sources(model)}
        self._deltas: dict[str, LoraDelta] = {}
        metas = {name: torch.empty(source.shape, device="meta") for name, source in sources.items()}
        for group in checkpoint_groups(model, metas):
            for name in group.sources:
                delta = sources[name].delta
                if delta is not None:
                    _check_adapted(sources[name], group, files, served_dtype if swap else torch.float32)
                    self._deltas[next(iter(group.outputs))] = delta
        if not self._deltas:
            raise ConfigError("model.lora.push: adapter needs adapters, and the model has none; set model.lora")
        self.specs = [spec for name, delta in self._deltas.items() for spec in _factor_specs(name, delta)]

    def differences(self, served: ServedParameters) -> list[str]:
        return problems_with_base(self.base.digest, served.base_digest, self._path)

    def gather(self) -> Iterator[torch.Tensor]:
        for delta in self._deltas.values():
            for factor in delta.factors():
                yield factor.to(self._device).contiguous()


def choose_parameters(
    model: Any, section: ModelSection, *, served_dtype: torch.dtype, device: torch.device
) -> GatheredParameters:
    if section.lora is not None and section.lora.push in ("adapter", "adapter_swap"):
        return AdapterParameters(model, section, served_dtype=served_dtype, device=device)
    return ShardedParameters(model, wire_dtype=served_dtype, device=device)


def _check_adapted(source: NamedTensor, group: FusedTensors, base: BaseWeights, served: torch.dtype) -> None:
    """Check that a server can add the adapter to the base's files, held in `served` or less; ConfigError if it cannot."""
    target = next(iter(group.outputs))
    spec = base.specs.get(target)
    if spec is None or not group.is_renamed_only:
        raise ConfigError(f"model.lora.push: the files of model.path have no {target} to add an adapter to; set merged")
    if source.tensor.dtype.itemsize < min(spec.dtype.itemsize, served.itemsize):
        raise ConfigError(
            f"model.lora.push: servers add to {target} as the files hold it ({spec.dtype_name}), the trainer has it rounded; set "
            "merged"
        )


def _factor_specs(name: str, delta: LoraDelta) -> Iterator[ParameterSpec]:
    (rows, rank), columns = delta.b.shape, delta.a.shape[1]
    yield ParameterSpec(name=name + LORA_B, dtype_name="float32", shape=(rows, rank))
    yield ParameterSpec(name=name + LORA_A, dtype_name="float32", shape=(rank, columns))
