"""Which tensors of a checkpoint are which tensors in memory, in both directions.

transformers 5 fuses some parameters when it loads a model (the experts of a mixture stand in one tensor) and takes them apart
when it saves it. Servers load the checkpoint's names, so a push has to take them apart too, one group at a time
(`checkpoint_groups`). Loading shards goes the other way, one tensor or one fused group at a time (`plan_reads`).

Worked example, 2 experts: layers.0.mlp.experts.gate_up_proj (2, 2 x 8, 16)
-> experts.0.gate_proj.weight, experts.0.up_proj.weight, experts.1.gate_proj.weight, experts.1.up_proj.weight, each (8, 16).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch

from grpo_async.errors import ConfigError

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Tensors in memory that belong together, and what they are in the checkpoint: name -> (shape, dtype)."""

    sources: tuple[str, ...]
    outputs: Shapes
    is_renamed_only: bool
    """One tensor, which the checkpoint has as it is."""


def checkpoint_groups(model: Any, sources: Mapping[str, torch.Tensor]) -> list[Group]:
    """Groups in the order of `sources`, as small as possible.

    Args:
        model: the Hugging Face model that knows how it was loaded.
        sources: name -> a tensor of that shape and dtype, on the device "meta".

    Raises:
        ConfigError: the model cannot be taken apart.
    """
    try:
        everything = _shapes(to_checkpoint(model, sources))
    except Exception as error:  # whatever transformers raises for a model that it cannot save either
        raise ConfigError(
            f"transformers cannot bring {type(model).__name__} into the form of its checkpoint: {error}"
        ) from error
    groups: dict[str, Group] = {}
    rest = list(sources)
    for key in (lambda name: name, _module_of, _layer_of, lambda _: ""):
        rest = _group(model, sources, rest, key, everything, groups)
    missing = everything.keys() - {name for group in groups.values() for name in group.outputs}
    if missing or rest:
        raise ConfigError(
            f"{type(model).__name__} cannot be sent in parts: {sorted(missing)[:5]} come of tensors all over the model"
        )
    return [groups[name] for name in sources if name in groups]


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Tensors of a checkpoint that are read together, and the parameter that they become (or, fused, the first of them)."""

    target: str
    keys: list[str] = field(default_factory=list)
    converter: Any = None
    """A WeightConverter of transformers; None: the one key is the parameter as it is."""
    patterns: list[str] = field(default_factory=list)
    """Of the converter, one for each key."""

    def convert(self, model: Any, read: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """The parameters by name; whole, and unfused ones are views of what `read` returned."""
        if self.converter is None:
            return {self.target: read(self.keys[0])}
        converter = deepcopy(self.converter)
        for key, pattern in zip(self.keys, self.patterns, strict=True):
            converter.add_tensor(self.target, key, pattern, lambda key=key: read(key))
        converted = converter.convert(self.target, model=model, config=model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in converted.items()}


def plan_reads(model: Any, names: Collection[str], available: Iterable[str]) -> tuple[list[Read], list[str]]:
    """What to read of a checkpoint, in its natural order, and its keys that belong to nothing in `model`.

    Worked example: 2 experts -> one Read with target layers.0.mlp.experts.gate_up_proj and four keys, and one for down_proj.

    Args:
        names: parameters and saved buffers of the model, tied names included.
        available: keys of the checkpoint.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [entry for entry in conversions if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in conversions if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    wanted = dict.fromkeys(names, True)  # what rename_source_key asks whether a name exists
    reads: dict[str, Read] = {}
    unexpected = []
    for key in sorted(available, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted and key in wanted:
            name, pattern = rename_source_key(key, [], [], model.base_model_prefix, wanted)
        if name not in wanted:
            unexpected.append(key)
            continue
        converter = by_pattern[pattern] if pattern is not None else None
        read = reads.setdefault(name, Read(target=name, converter=converter))
        read.keys.append(key)
        if pattern is not None:
            read.patterns.append(pattern)
    model._weight_conversions = [conversion for conversion in conversions if conversion.was_used()]  # for saving
    return list(reads.values()), unexpected


def to_checkpoint(model: Any, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Name and form of the checkpoint for tensors of `model`, as `save_pretrained` writes them."""
    from transformers.core_model_loading import revert_weight_conversion

    converted: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(tensors))
    return converted


def _group(
    model: Any,
    sources: Mapping[str, torch.Tensor],
    names: Sequence[str],
    key: Callable[[str], str],
    everything: Shapes,
    groups: dict[str, Group],
) -> list[str]:
    """Add the groups by `key` that give what the whole model gives, under the name of their first tensor; returns the rest."""
    by_key: dict[str, list[str]] = {}
    for name in names:
        by_key.setdefault(key(name), []).append(name)
    rest = []
    for members in by_key.values():
        try:
            converted = to_checkpoint(model, {name: sources[name] for name in members})
        except Exception:  # noqa: BLE001 - parts of what belongs together cannot be converted: a larger group is tried
            rest.extend(members)
            continue
        outputs = _shapes(converted)
        if not outputs or any(everything.get(name) != shape for name, shape in outputs.items()):
            rest.extend(members)
            continue
        untouched = len(members) == 1 and next(iter(converted.values())) is sources[members[0]]
        groups[members[0]] = Group(
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
