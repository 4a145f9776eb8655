"""Prints the bytes that one rank takes at its peak, of FSDP2 on ranks that do not exist with tensors that have no memory; run as
a process of its own: `python -m tests.checks.fake_ranks '[{...}, ...]'`. Qwen3 in float32, computed in bfloat16, without an
optimizer."""

from __future__ import annotations

import json
import sys

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from grpo_async.training import logprobs
from grpo_async.training.load import _materialize
from grpo_async.training.model import Policy, make_mesh, recompute_activations, shard_policy
from grpo_async.training.verify import one_row


def peak_bytes(*, ranks: int, tokens: int, checkpointing: str, **sizes: int) -> int:
    """Two micro-batches of one sample, so that the gradients of the first are there in the second."""
    from transformers import AutoConfig, AutoModelForCausalLM

    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    logprobs._CACHED = logprobs._LAUNCHED  # blocks as on a GPU
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **sizes))
    recompute_activations(model, checkpointing)  # type: ignore[arg-type]
    policy = Policy(model, temperature=1.0, chunk_tokens=1024)
    cpu, mesh = torch.device("cpu"), make_mesh("cpu", world_size=ranks)
    with FakeTensorMode(allow_non_fake_inputs=True):
        shard_policy(policy, mesh, compute_dtype=torch.bfloat16)
        _materialize(policy, cpu)
        tracker = MemTracker()
        tracker.track_external(policy)
        with tracker:
            batch = one_row([0] * tokens)
            for _ in range(2):
                output = policy(batch, objective=lambda chosen, *_: chosen.sum())
                assert output.objective is not None
                output.objective.backward()
                del output
                tracker.reset_mod_stats()
        dist.destroy_process_group()
        peak: int = tracker.get_tracker_snapshot("peak")[cpu]["Total"]
    return peak


if __name__ == "__main__":
    print(json.dumps([peak_bytes(**order) for order in json.loads(sys.argv[1])]))
