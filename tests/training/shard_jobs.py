"""What the ranks of the tests of loading, sharding, adapters and optimizers do; run by `run_on_ranks(..., module=MODULE)`."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from grpo_async.config.sections import ModelSection
from grpo_async.training import load as load_module
from grpo_async.training import step as step_module
from grpo_async.training.model import Policy, Reference, make_mesh, shard_policy
from grpo_async.training.parameters import list_sources
from grpo_async.training.verify import one_row, score_sequences
from tests.support.rank_jobs import build, one_step, random_samples

MODULE = "tests.training.shard_jobs"
SEQUENCES = [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]]


def weights_of(policy: Policy) -> dict[str, torch.Tensor]:
    """Merged, whole, by name."""
    return {source.name: source.gather().clone() for source in list_sources(policy.model)}


def load_sharded(model: str, out: str, *, device: str = "cpu", cpu_offload: bool = False) -> dict[str, Any]:
    policy, _ = build(model, device=device, cpu_offload=cpu_offload)
    weights = weights_of(policy)
    assert all(tensor.device.type == device for tensor in weights.values()), "offloaded shards were gathered over gloo"
    if dist.get_rank() == 0:
        torch.save({name: tensor.cpu() for name, tensor in weights.items()}, out)
    local = sum(parameter.to_local().numel() for parameter in policy.parameters())  # type: ignore[attr-defined]
    sizes: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sizes, local)
    return {"local": sizes, "logprobs": score_sequences(policy, SEQUENCES, device=torch.device(device))[0]}


def load_slowly(model: str, seconds: float, deadline_s: float) -> dict[str, Any]:
    """Load files that take so long to open, with a shorter deadline of collectives. Returns the bytes of the shards, of the largest
    tensor in float32, and, of each rank, the most that its own memory (without the mapped files) grew."""
    opened = load_module._open
    load_module._open = lambda *arguments: (time.sleep(seconds), opened(*arguments))[1]
    distributed_c10d._set_pg_timeout(timedelta(seconds=deadline_s))
    import transformers.models.qwen3.modeling_qwen3  # noqa: F401 - its memory is not that of the load

    begin = most = _own_bytes()
    is_over = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_over.wait(0.002):
            most = max(most, _own_bytes())

    watcher = threading.Thread(target=watch)
    watcher.start()
    section = ModelSection(path=model)
    policy = load_module.build_policy(section, temperature=1.0, chunk_tokens=16, max_model_len=256)
    shard_policy(policy, make_mesh("cpu", world_size=dist.get_world_size()), compute_dtype=torch.float32)
    load_module.load_weights(policy, section, device=torch.device("cpu"))
    is_over.set()
    watcher.join()
    grown: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(grown, most - begin)
    sizes = [parameter.numel() * 4 for parameter in policy.parameters()]
    return {"shard": sum(sizes) // dist.get_world_size(), "largest": max(sizes), "grown": grown}


def _own_bytes() -> int:
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


def train(
    model: str, *, out: str, micro_batch_tokens: int = 4096, as_on_gpu: bool = False, **settings: Any
) -> dict[str, Any]:
    """Two steps; merged weights go to `out`. `as_on_gpu`: gradients travel after every micro-batch."""
    if as_on_gpu:
        original = step_module._set_gradient_sync
        step_module._set_gradient_sync = lambda policy, device, **more: original(policy, torch.device("cuda"), **more)
    policy, optimizer = build(model, **settings)
    results = [
        one_step(policy, optimizer, random_samples(seed=seed), micro_batch_tokens=micro_batch_tokens) for seed in (0, 1)
    ]
    weights = weights_of(policy)
    if dist.get_rank() == 0:
        torch.save(weights, out)
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "frozen": sum(not parameter.requires_grad for parameter in policy.parameters()),
    }


def ask_references(model: str, other: str) -> dict[str, Any]:
    """Both kinds of reference before and after a step, with parameters that stay gathered after a forward pass."""
    policy, optimizer = build(model, lora={"rank": 4}, reshard_after_forward=False)
    frozen, _ = build(other, reshard_after_forward=False)
    references = {"off": Reference(policy, without_adapters=True), "frozen": Reference(frozen)}
    batch = one_row(SEQUENCES[0])
    first = {name: reference.logprobs(batch).tolist() for name, reference in references.items()}
    for seed in (0, 1):  # B is zero at first, and so is the gradient of A
        one_step(policy, optimizer, random_samples(seed=seed))
        second = {name: reference.logprobs(batch).tolist() for name, reference in references.items()}
        gathered = sum(not hasattr(parameter, "to_local") for parameter in policy.parameters())
    return {
        "first": first,
        "second": second,
        "gathered": gathered,
        "frozen": sum(parameter.requires_grad for parameter in frozen.parameters()),
    }
