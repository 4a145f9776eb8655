"""What the ranks of the tests of loading, sharding, adapters and optimizers do; run by `run_on_ranks(..., module=MODULE)`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import distribute_tensor

from grpo_async.config.sections import LoraSection, ModelSection, OptimizerSection
from grpo_async.training.load import build_policy, load_weights
from grpo_async.training.model import Policy, make_mesh, reshard, shard_policy
from grpo_async.training.optimizer import make_optimizer
from grpo_async.training.parameters import list_sources
from grpo_async.training.reference import Reference, one_row, score_sequences
from tests.support.rank_jobs import one_step, random_samples

MODULE = "tests.training.shard_jobs"
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]


def build(
    model: str,
    *,
    optimizer: dict[str, Any] | None = None,
    lora: dict[str, Any] | None = None,
    num_nodes: int = 1,
    compute_dtype: str = "float32",
    reshard_after_forward: bool = True,
    **settings: Any,
) -> tuple[Policy, torch.optim.Optimizer]:
    """A policy as a run builds it: on "meta", sharded, then loaded."""
    section = ModelSection(path=model, lora=LoraSection(**lora) if lora else None, **settings)
    policy = build_policy(section, temperature=1.0, chunk_tokens=16, max_model_len=256)
    mesh = make_mesh("cpu", world_size=dist.get_world_size(), num_nodes=num_nodes, sharding="hybrid")
    shard_policy(policy, mesh, compute_dtype=getattr(torch, compute_dtype), reshard_after_forward=reshard_after_forward)
    load_weights(policy, section, device=torch.device("cpu"))
    return policy, make_optimizer(policy, OptimizerSection(**{"lr": 1e-3, "weight_decay": 0.1, **(optimizer or {})}))


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    """Merged, whole, by name."""
    return {source.name: source.gather().clone() for source in list_sources(policy.model)}


def load_sharded(model: str, out: str) -> dict[str, Any]:
    policy, _ = build(model)
    weights = weights_of(policy)
    if dist.get_rank() == 0:
        torch.save(weights, out)
    local = sum(parameter.to_local().numel() for parameter in policy.parameters())  # type: ignore[attr-defined]
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, local)
    return {"local": sizes, "logprobs": score_sequences(policy, SEQUENCES, device=torch.device("cpu"))[0]}


def train(
    model: str,
    *,
    out: str | None = None,
    steps: int = 2,
    loss_scale: float = 1.0,
    **settings: Any,
) -> dict[str, Any]:
    """Two steps; merged weights go to `out`."""
    policy, optimizer = build(model, **settings)
    results = [one_step(policy, optimizer, random_samples(seed=seed), loss_scale=loss_scale) for seed in range(steps)]
    weights = weights_of(policy)
    if out is not None and dist.get_rank() == 0:
        torch.save(weights, out)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "frozen": sum(not parameter.requires_grad for parameter in policy.parameters()),
        "state_bytes": sum(
            tensor.to_local().nbytes if hasattr(tensor, "to_local") else tensor.nbytes
            for state in optimizer.state.values()
            for tensor in state.values()
            if isinstance(tensor, torch.Tensor)
        ),
    }


def ask_references(model: str, other: str) -> dict[str, Any]:
    """Both kinds of reference before and after a step, with parameters that stay gathered after a forward pass."""
    policy, optimizer = build(model, lora={"rank": 4}, reshard_after_forward=False)
    frozen, _ = build(other, reshard_after_forward=False)
    references = {"off": Reference(policy, without_adapters=True), "frozen": Reference(frozen)}
    batch, empty = one_row(SEQUENCES[0]), one_row(SEQUENCES[0][:1])
    first = {name: reference.logprobs(batch).tolist() for name, reference in references.items()}
    nothing = [reference.logprobs(empty).numel() for reference in references.values()]
    for seed in (0, 1):  # B is zero at first, and so is the gradient of A
        one_step(policy, optimizer, random_samples(seed=seed))
        second = {name: reference.logprobs(batch).tolist() for name, reference in references.items()}
        gathered = sum(not hasattr(parameter, "to_local") for parameter in policy.parameters())
    with torch.no_grad():
        moved = policy(batch).logprobs.tolist()
    reshard(policy)
    merged = build(model)[0]  # what the policy has learned, in a model of its own
    sources = {source.name: source for source in list_sources(merged.model)}
    for name, tensor in weights_of(policy).items():
        target = sources[name].tensor
        target.data.copy_(distribute_tensor(tensor, target.device_mesh, target.placements))  # type: ignore[attr-defined]
    return {
        "first": first,
        "second": second,
        "nothing": nothing,
        "gathered": gathered,
        "moved": moved,
        "merged": Reference(merged).logprobs(batch).tolist(),
        "frozen": sum(parameter.requires_grad for parameter in frozen.parameters()),
    }


def train_save_and_go_on(model: str, optimizers: list[str], out: str, state: str) -> dict[str, list[float]]:
    """With each kind of optimizer: two steps, a checkpoint, a third step."""
    found = {}
    for kind in optimizers:
        policy, optimizer = build(model, optimizer={"type": kind})
        losses = [one_step(policy, optimizer, random_samples(seed=seed)).loss for seed in (0, 1)]
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=f"{state}/{kind}")
        found[kind] = [*losses, _third_step(policy, optimizer, Path(out), kind)]
    return found


def load_and_go_on(model: str, optimizers: list[str], out: str, state: str) -> dict[str, list[float]]:
    """The third step, from the checkpoint, by a policy that was somewhere else."""
    found = {}
    for kind in optimizers:
        policy, optimizer = build(model, optimizer={"type": kind})
        one_step(policy, optimizer, random_samples(seed=9))
        model_state, optimizer_state = get_state_dict(policy, optimizer)
        loaded = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(loaded, checkpoint_id=f"{state}/{kind}")
        set_state_dict(policy, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        found[kind] = [_third_step(policy, optimizer, Path(out), kind)]
    return found


def _third_step(policy: Policy, optimizer: torch.optim.Optimizer, out: Path, kind: str) -> float:
    loss = one_step(policy, optimizer, random_samples(seed=2)).loss
    weights = weights_of(policy)
    if dist.get_rank() == 0:
        out.mkdir(exist_ok=True)
        torch.save(weights, out / f"{kind}.pt")
    return loss
