"""Shards the policy over the trainer's ranks by FSDP2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from grpo_async.training.policy import Policy


def shard_policy(policy: Policy, mesh: DeviceMesh, *, compute_dtype: torch.dtype) -> None:
    """Apply FSDP2 in place: every decoder layer is one unit, the rest (embeddings, norm, head) is the root's."""
    policy.to(mesh.device_type)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    for layer in _decoder_layers(policy.model):
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(policy, mesh=mesh, mp_policy=precision)


def _decoder_layers(model: Any) -> Sequence[nn.Module]:
    """The longest ModuleList of the model: its decoder layers, in every Hugging Face causal LM."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    return cast(Sequence[nn.Module], max(lists, key=len)) if lists else []
