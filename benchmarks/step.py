"""The trainer's step: each shared prefix once against packed without sharing and against padded, and MFU.

    python -m benchmarks step [--rounds 9] [--json FILE]
    python -m benchmarks step --device cuda --dtype bfloat16 --shape 1.7b --micro-batch-tokens 32768 --completion-tokens 4096
                              --chunk 4096

A random Qwen3 trains on ragged random samples, with GRPO's clipped loss and AdamW. Three trainers take turns in one process, with
equally many tokens in a micro-batch, padding included: one with `training.pack: true`, one that does the same but computes the
prompt of a group once for each sample, and one with `pack: false`, which pads samples of similar length to the longest of their
micro-batch.

Tokens are trained tokens (of completions). "needed / computed" is above 1 where prefixes are shared. On a GPU that is listed in
_models.py the MFU is that of the side without sharing: tokens/s x ModelSize.training_flops / peak. The exit code is 1 when the
packed step is not as fast as the others.
Host syncs of an update are counted in tests/training/test_step.py; a run's timeline (`events.jsonl`) says
where the time of a step goes.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from benchmarks._models import SHAPES
from benchmarks.report import Report, device_of, parser_of, ratios, time_in_turns
from grpo_async.utils.devices import listed_peaks
from grpo_async.utils.processes import usable_cpus

SIDES = ("packed", "unshared", "padded")
PHASES = ("plan", "divide", "send", "pack")
SAME = 1e-3  # relative difference of loss and norm in the first step, which both compute from the same weights
TIMEOUT_S = 1800.0


def main(arguments: list[str]) -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--group-size", type=int, default=8, help="samples that share a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--completion-tokens", type=int, default=256)
    parser.add_argument(
        "--micro-batch-tokens", type=int, default=2048, help="tokens of one forward pass, padding included"
    )
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small", help="shape of the model")
    parser.add_argument("--chunk", type=int, default=1024, help="training.logprob_chunk_tokens")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the forward pass")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--threads", type=int, default=usable_cpus(), help="threads of torch")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args(arguments)
    return _measure(options)


def _measure(options: argparse.Namespace) -> int:
    import torch

    torch.set_num_threads(options.threads)
    device = device_of(options)
    samples = make_samples(options)
    trained = sum(sample.num_trained_tokens for sample in samples)
    lengths = [len(sample.token_ids) for sample in samples]
    shape = SHAPES[options.shape]
    report = Report("step", options)
    with process_group(device):
        sides = {name: _trainer(samples, options, device, side=name) for name in SIDES}
        # the first step allocates memory, threads and optimizer states
        first = {name: side() for name, side in sides.items()}
        for name, (found, _) in first.items():
            for value, right in zip(found, first["packed"][0], strict=True):
                if options.dtype == "float32" and abs(value - right) > SAME * max(abs(right), 0.01):
                    raise SystemExit(f"loss and norm are not the same: {found} {name}, {first['packed'][0]} packed")
        seconds = time_in_turns(sides, options.rounds)
    for name, values in seconds.items():
        report.row(f"{name}: trained tokens/s", [trained / value for value in values], "tokens/s")
    speedups = {name: ratios(seconds, name, "packed") for name in SIDES[1:]}
    for name, values in speedups.items():
        report.row(f"packed over {name}", values, "ratio")
    for name, (_, tokens) in first.items():
        report.row(f"{name}: needed / computed tokens", [sum(lengths) / tokens], "fraction")
    if device.type == "cuda":
        if (peaks := listed_peaks(torch.cuda.get_device_name())) is not None:
            flops = sum(length * shape.size.training_flops(length) for length in lengths)
            report.row("unshared: MFU", [flops / peaks.flops / each for each in seconds["unshared"]], "fraction")
        report.row("memory of all, peak", [torch.cuda.max_memory_allocated() / 2**30], "GiB")
    for name, values in speedups.items():
        report.target(f"packed over {name}, median of the rounds", statistics.median(values), at_least=1.0)
    report.note(
        f"{len(samples)} samples, {sum(lengths)} tokens, {trained} of them trained; {options.threads} threads, {device.type}; "
        f"{shape.num_parameters / 1e6:.1f} M parameters"
    )
    return report.finish()


def _trainer(
    samples: Sequence[Any], options: argparse.Namespace, device: Any, *, side: str
) -> Callable[[], tuple[tuple[float, float], int]]:
    """A step with FSDP, plan -> pack -> train_step as in the trainer's loop; returns ((loss, norm of the gradient), tokens that it
    computed, padding included)."""
    import torch

    from grpo_async.batching.minibatch import token_weights
    from grpo_async.batching.pack import split_by_rank
    from grpo_async.batching.plan import plan_batch
    from grpo_async.batching.prefixes import prefix_order
    from grpo_async.config.sections import ClippedLoss, OptimizerSection
    from grpo_async.training.attention import choose_attention
    from grpo_async.training.loss import Objective
    from grpo_async.training.model import Policy, make_mesh, shard_policy
    from grpo_async.training.optimizer import make_optimizer
    from grpo_async.training.step import train_step

    section, dtype = OptimizerSection(), getattr(torch, options.dtype)
    longest = options.prompt_tokens + options.completion_tokens
    model = (
        SHAPES[options.shape].build(seed=options.seed, max_length=longest, use_cache=False).train()
    )  # master weights
    attention, _ = choose_attention("auto", device=device, dtype=dtype, config=model.config)
    policy = Policy(model, temperature=1.0, chunk_tokens=options.chunk, attention=attention)
    shard_policy(policy, make_mesh(device.type, world_size=1), compute_dtype=dtype)
    optimizer = make_optimizer(policy, section)
    objective = Objective(ClippedLoss(type="dapo"), num_updates=1)

    def step() -> tuple[tuple[float, float], int]:
        plan = plan_batch(
            [len(sample.token_ids) for sample in samples],
            world_size=1,
            micro_batch_tokens=options.micro_batch_tokens,
            pack=side != "padded",
            prefixes=prefix_order([sample.token_ids for sample in samples]) if side == "packed" else None,
        )
        weights = token_weights(samples, plan, reduction="dapo", max_completion_tokens=options.completion_tokens)
        (part,) = split_by_rank(samples, weights, plan, trainer_version=0)
        result = train_step(
            policy, optimizer, [part.pack()], objective=objective, reference=None, lr=section.lr,
            max_grad_norm=section.max_grad_norm, device=device,
        )  # fmt: skip
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (result.loss, result.grad_norm), plan.num_computed_tokens

    return step


def make_samples(options: argparse.Namespace) -> list[Any]:
    """Groups of --group-size samples, with one prompt of half to all of --prompt-tokens, and completions of 1/16 to all of
    --completion-tokens. Most are short (the square of a uniform number), as with reasoning models."""
    from grpo_async.records import RolloutSample

    draw = np.random.default_rng(options.seed)
    vocab = SHAPES[options.shape].vocab
    samples = []
    num_prompt = 0
    prompt = np.empty(0, np.int32)
    for number in range(options.samples):
        if number % options.group_size == 0:
            num_prompt = int(draw.integers(max(1, options.prompt_tokens // 2), options.prompt_tokens + 1))
            prompt = draw.integers(vocab, size=num_prompt, dtype=np.int32)
        shortest = max(1, options.completion_tokens // 16)
        length = shortest + round((options.completion_tokens - shortest) * draw.random() ** 2)
        is_sampled = np.arange(num_prompt + length) >= num_prompt
        logprobs = draw.normal(-math.log(vocab), 0.1, num_prompt + length)
        samples.append(
            RolloutSample(
                group_id=number // options.group_size,
                rollout_id=str(number),
                token_ids=np.concatenate([prompt, draw.integers(vocab, size=length, dtype=np.int32)]),
                loss_mask=is_sampled,
                sampler_logprobs=np.where(is_sampled, logprobs, 0.0).astype(np.float32),
                policy_versions=np.where(is_sampled, 0, -1).astype(np.int32),
                advantage=draw.normal(),
                rewards={},
                reward=None,
                truncated=False,
            )
        )
    return samples


@contextmanager
def process_group(device: Any) -> Iterator[None]:
    """A process group of this process alone."""
    import torch
    import torch.distributed as dist

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
