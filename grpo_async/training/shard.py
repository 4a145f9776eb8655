"""Shards the policy over the trainer's ranks by FSDP2.

Order: adapters -> activation checkpointing -> compile -> shard_policy -> load_weights. Gathered weights, activations and products
are in the compute dtype, gradients are reduced and parameters kept in the master dtype (float32).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from grpo_async.errors import ConfigError
from grpo_async.training.policy import Policy
from grpo_async.training.recompute import decoder_layers


def make_mesh(
    device_type: str, *, world_size: int, num_nodes: int = 1, sharding: Literal["full", "hybrid"] = "full"
) -> DeviceMesh:
    """The ranks as FSDP divides them: all of them, or (nodes, ranks of a node) where a node holds a whole copy (HSDP).

    Worked example: 4 ranks on 2 nodes, hybrid -> [[0, 1], [2, 3]], sharded within a row and replicated over rows.
    """
    if sharding == "full" or num_nodes == 1:
        return init_device_mesh(device_type, (world_size,))
    return init_device_mesh(device_type, (num_nodes, world_size // num_nodes), mesh_dim_names=("replicate", "shard"))


def shard_policy(
    policy: Policy,
    mesh: DeviceMesh,
    *,
    compute_dtype: torch.dtype,
    reshard_after_forward: bool = True,
    cpu_offload: bool = False,
) -> None:
    """Apply FSDP2 in place: every decoder layer is one unit, the rest (embeddings, norm, head) is the root's. Parameters on "meta"
    stay there until `load_weights`.

    Args:
        reshard_after_forward: give a layer's gathered parameters back until the backward pass.
        cpu_offload: keep the shards in the machine's memory.

    Raises:
        ConfigError: there is nothing to offload on a CPU.
    """
    if cpu_offload and mesh.device_type == "cpu":
        raise ConfigError(
            "training.cpu_offload: the trainer runs on the CPU, everything is in the machine's memory already; set it to false"
        )
    if not any(parameter.device.type == "meta" for parameter in policy.parameters()):
        policy.to(mesh.device_type)
    precision = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy() if cpu_offload else OffloadPolicy()
    for layer in decoder_layers(policy.model):
        fully_shard(
            layer, mesh=mesh, mp_policy=precision, reshard_after_forward=reshard_after_forward, offload_policy=offload
        )
    fully_shard(policy, mesh=mesh, mp_policy=precision, offload_policy=offload)


def reshard(policy: nn.Module) -> None:
    """Give back every parameter that is gathered; call it after a forward pass that no backward pass follows. What stayed gathered
    would miss the next update."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
