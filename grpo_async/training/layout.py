"""Which tensors of a checkpoint come of which tensors in memory.

transformers 5 fuses some parameters when it loads a model (the experts of a mixture stand in one tensor) and takes them apart
when it saves it. Servers load the checkpoint's names, so a push has to take them apart too, one group at a time.

Worked example, 2 experts: layers.0.mlp.experts.gate_up_proj (2, 2 x 8, 16)
-> experts.0.gate_proj.weight, experts.0.up_proj.weight, experts.1.gate_proj.weight, experts.1.up_proj.weight, each (8, 16).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
