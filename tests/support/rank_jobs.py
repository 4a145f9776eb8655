"""What the ranks of the tests do; started by `run_on_ranks` under torchrun."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from grpo_async.batching.pack import Reduction, pack_rank, token_weights
from grpo_async.batching.plan import plan_batch
from grpo_async.config.loss_sections import ClippedLoss
from grpo_async.config.model_sections import ModelSection, OptimizerSection
from grpo_async.errors import CheckpointError
from grpo_async.records import RolloutSample
from grpo_async.rundir import RunDir
from grpo_async.training import checkpoint
from grpo_async.training.load import load_policy
from grpo_async.training.optimizers import make_optimizer
from grpo_async.training.parameters import ShardedParameters
from grpo_async.training.policy import Policy
from grpo_async.training.score import score_sequences
from grpo_async.training.shard import shard_policy
from grpo_async.training.step import StepResult, train_step
from tests.support.records import make_sample


def random_samples(count: int = 12, *, seed: int = 0) -> list[RolloutSample]:
    """Ragged samples with random tokens, advantages and sampler logprobs."""
    generator = torch.Generator().manual_seed(seed)

    def numbers(length: int) -> list[int]:
        return torch.randint(3, 300, (length,), generator=generator).tolist()

    samples = []
    for _ in range(count):
        lengths = torch.randint(2, 20, (2,), generator=generator).tolist()
        logprobs = (-6.0 + torch.randn(lengths[1], generator=generator) * 0.1).tolist()
        advantage = float(torch.randn(1, generator=generator))
        samples.append(
            make_sample(
                prompt=numbers(lengths[0]), completion=numbers(lengths[1]), advantage=advantage, logprobs=logprobs
            )
        )
    return samples


def build(model: str) -> tuple[Policy, torch.optim.AdamW]:
    policy = load_policy(ModelSection(path=model), temperature=1.0, chunk_tokens=16, max_model_len=256)
    shard_policy(policy, init_device_mesh("cpu", (dist.get_world_size(),)), compute_dtype=torch.float32)
    return policy, make_optimizer(policy, OptimizerSection(lr=1e-3, weight_decay=0.1))


def one_step(
    policy: Policy,
    optimizer: torch.optim.AdamW,
    samples: list[RolloutSample],
    *,
    micro_batch_tokens: int = 4096,
    row_tokens: int | None = None,
    pack: bool = True,
    reduction: Reduction = "dapo",
) -> StepResult:
    plan = plan_batch(
        [len(sample.token_ids) for sample in samples],
        num_ranks=dist.get_world_size(),
        micro_batch_tokens=micro_batch_tokens,
        row_tokens=row_tokens,
        pack=pack,
    )
    weights = token_weights(samples, reduction=reduction, max_completion_tokens=32)
    batches = pack_rank(samples, weights, plan, dist.get_rank(), trainer_version=0)
    return train_step(
        policy, optimizer, batches, loss=ClippedLoss(), lr=1e-3, max_grad_norm=0.5, device=torch.device("cpu")
    )


def fingerprint(policy: Policy) -> dict[str, float]:
    """A weighted sum per parameter: changes when any element changes or moves."""
    parameters = ShardedParameters(policy.model, wire_dtype=torch.float32)
    values = {}
    specs = iter(parameters.specs)
    for bucket in parameters.buckets(1 << 16):
        for tensor in bucket:
            flat = tensor.double().reshape(-1)
            values[next(specs).name] = float((flat * torch.linspace(1.0, 2.0, flat.numel())).sum())
    return values


def train_two_steps(model: str, **settings: Any) -> dict[str, Any]:
    policy, optimizer = build(model)
    results = [one_step(policy, optimizer, random_samples(seed=seed), **settings) for seed in (0, 1)]
    return {
        "losses": [result.loss for result in results],
        "norms": [result.grad_norm for result in results],
        "tokens": [result.num_tokens for result in results],
        "metrics": results[1].metrics,
        "weights": fingerprint(policy),
    }


def train_fewer_samples_than_ranks(model: str) -> dict[str, Any]:
    policy, optimizer = build(model)
    result = one_step(policy, optimizer, random_samples(1))
    return {"loss": result.loss, "norm": result.grad_norm, "weights": fingerprint(policy)}


def save_after_one_step(model: str, run: str) -> dict[str, Any]:
    policy, optimizer = build(model)
    one_step(policy, optimizer, random_samples(seed=0))
    rundir = RunDir(Path(run))
    if dist.get_rank() == 0:
        rundir.create()
    state = checkpoint.TrainerState(step=1, data={"next": 5}, outstanding_prompts=[3], ledger={}, progress={})
    checkpoint.save_checkpoint(rundir, 1, policy, optimizer, state if dist.get_rank() == 0 else None)
    result = one_step(policy, optimizer, random_samples(seed=1))
    return {"loss": result.loss, "weights": fingerprint(policy)}


def load_and_go_on(model: str, run: str) -> dict[str, Any]:
    policy, optimizer = build(model)
    one_step(policy, optimizer, random_samples(seed=9))  # somewhere else, so that loading has to change everything
    rundir = RunDir(Path(run))
    checkpoint.load_tensors(rundir, 1, policy, optimizer)
    state = checkpoint.load_state(rundir, 1)
    result = one_step(policy, optimizer, random_samples(seed=1))
    return {"loss": result.loss, "weights": fingerprint(policy), "step": state.step, "data": state.data}


def save_on_a_full_disk(model: str, run: str) -> dict[str, Any]:
    """Checkpoint 1 is written; while 2 is, no file may grow beyond 1000 bytes."""
    policy, optimizer = build(model)
    rundir = RunDir(Path(run))
    rundir.create()
    for step in (1, 2):
        one_step(policy, optimizer, random_samples())
        state = checkpoint.TrainerState(step=step, data={}, outstanding_prompts=[], ledger={}, progress={})
        if step == 2:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            limits = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            checkpoint.save_checkpoint(rundir, step, policy, optimizer, state)
        except CheckpointError as error:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
            return {"error": str(error)}
    return {"error": None}


def score_between_steps(model: str, sequences: list[list[int]]) -> dict[str, Any]:
    policy, optimizer = build(model)
    scores = [score_sequences(policy, sequences, device=torch.device("cpu"))]
    one_step(policy, optimizer, random_samples())
    scores.append(score_sequences(policy, sequences, device=torch.device("cpu")))
    result = one_step(policy, optimizer, random_samples(seed=1))
    return {"scores": scores, "loss": result.loss, "weights": fingerprint(policy)}


def export(model: str, target: str) -> dict[str, Any]:
    from transformers import AutoTokenizer

    policy, optimizer = build(model)
    one_step(policy, optimizer, random_samples())
    checkpoint.export_model(Path(target), policy, AutoTokenizer.from_pretrained(model))
    return {"weights": fingerprint(policy)}


def main() -> None:
    name, result, arguments = sys.argv[1:4]
    torch.set_num_threads(1)
    world_size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    store = dist.FileStore(os.environ["RANK_STORE"], world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        returned = globals()[name](**json.loads(arguments))
        if rank == 0:
            Path(result).write_text(json.dumps(returned))
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
