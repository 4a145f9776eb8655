"""The two sides of benchmarks/step.py: a training step of ours, and a plain padded loop around the same Hugging Face model.

Both get the same samples, the same loss (GRPO's clipped ratio with advantages), AdamW, and as many tokens in a micro-batch, padding
included. The plain loop pads prompts on the left and completions on the right, and computes logits of completions only.
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from benchmarks._models import SIZES
from grpo_async.batching.minibatch import token_weights
from grpo_async.batching.pack import split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.config.sections import ClippedLoss, OptimizerSection
from grpo_async.records import RolloutSample
from grpo_async.training.attention import choose_attention
from grpo_async.training.loss import Objective
from grpo_async.training.model import Policy, make_mesh, shard_policy
from grpo_async.training.optimizer import make_optimizer
from grpo_async.training.step import train_step

EPSILON = 0.2
MAX_NORM = 1.0
LR = 1e-6
TIMEOUT_S = 1800.0


@contextmanager
def process_group(num_ranks: int, device: torch.device) -> Iterator[None]:
    """Of torchrun's ranks, or of this process alone."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend, timeout = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo", timedelta(seconds=TIMEOUT_S)
    alone = {} if num_ranks > 1 else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(backend, timeout=timeout, **alone)
    try:
        yield
    finally:
        dist.destroy_process_group()


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """What one step says of itself. `computed_tokens`: of all forwards, padding included."""

    loss: float
    grad_norm: float
    computed_tokens: int
    num_micro_batches: int


def make_samples(options: argparse.Namespace) -> list[RolloutSample]:
    """Groups of --group-size samples with one prompt of half to all of --prompt-tokens, and completions of 1/16 to all of
    --completion-tokens, most of them short (the square of an even draw), as those of reasoning models are."""
    draw = np.random.default_rng(options.seed)
    vocab = SIZES[options.shape].vocab
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


class OurSide:
    """plan -> pack -> train_step, as the trainer's loop does it, on the shards of FSDP."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self._options, self._device = options, device
        dtype = getattr(torch, options.dtype)
        model = _model(options)
        attention, _ = choose_attention("auto", device=device, dtype=dtype, config=model.config)
        self.policy = Policy(model, temperature=1.0, chunk_tokens=options.chunk, attention=attention)
        shard_policy(self.policy, make_mesh(device.type, world_size=1), compute_dtype=dtype)
        self.optimizer = make_optimizer(self.policy, OptimizerSection(lr=LR))
        self._objective = Objective(ClippedLoss(type="dapo", epsilon=EPSILON, epsilon_high=EPSILON), num_updates=1)

    def step(self, samples: Sequence[RolloutSample]) -> StepOutcome:
        """One update."""
        plan = plan_batch(
            [len(sample.token_ids) for sample in samples],
            num_ranks=1,
            micro_batch_tokens=self._options.micro_batch_tokens,
            pack=True,
        )
        weights = token_weights(samples, plan, reduction="dapo", max_completion_tokens=self._options.completion_tokens)
        (part,) = split_by_rank(samples, weights, plan, trainer_version=0)
        result = train_step(
            self.policy, self.optimizer, [part.pack()], objective=self._objective, reference=None, lr=LR, max_grad_norm=MAX_NORM,
            device=self._device,
        )  # fmt: skip
        return StepOutcome(result.loss, result.grad_norm, plan.num_computed_tokens, plan.num_micro_batches)


class PlainSide:
    """A padded loop.

    Args:
        is_sorted: samples of like length go into one micro-batch, which few plain loops do and which pads less.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device, *, is_sorted: bool) -> None:
        self._options, self._device, self._is_sorted = options, device, is_sorted
        self._dtype = getattr(torch, options.dtype)
        self._model = _model(options).to(device)
        section = OptimizerSection()
        self._optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=LR, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay
        )

    def step(self, samples: Sequence[RolloutSample]) -> StepOutcome:
        """One update; a micro-batch has as many samples as fit with their padding."""
        batches: list[list[RolloutSample]] = [[]]
        for sample in sorted(samples, key=lambda s: -len(s.token_ids)) if self._is_sorted else samples:
            rows, length = _grid([*batches[-1], sample])
            if batches[-1] and rows * length > self._options.micro_batch_tokens:
                batches.append([])
            batches[-1].append(sample)
        num_trained = sum(sample.num_trained_tokens for sample in samples)
        total = torch.zeros((), device=self._device)
        for batch in batches:
            loss = self._loss(*(tensor.to(self._device) for tensor in pad(batch))) / num_trained
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        computed = sum(rows * length for rows, length in map(_grid, batches))
        return StepOutcome(float(total), float(norm), computed, len(batches))

    def _loss(
        self, ids: torch.Tensor, mask: torch.Tensor, trained: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor
    ) -> torch.Tensor:
        """Sum over the trained tokens. `ids` and `mask` (B, T); `trained` and `old` (B, C) of the last C; `advantages` (B,)."""
        width = trained.shape[1]
        with torch.autocast(self._device.type, self._dtype, enabled=self._dtype != torch.float32):
            logits = self._model(input_ids=ids, attention_mask=mask, logits_to_keep=width + 1).logits[:, :-1]
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(-1, ids[:, -width:, None])[..., 0]
        ratio = torch.exp(logprobs - old)
        clipped = ratio.clamp(1.0 - EPSILON, 1.0 + EPSILON)
        loss = -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
        return (loss * trained).sum()


def _model(options: argparse.Namespace) -> Any:
    """In float32, as master weights are."""
    max_length = options.prompt_tokens + options.completion_tokens
    return SIZES[options.shape].build(seed=options.seed, max_length=max_length, use_cache=False).train()


def pad(samples: Sequence[RolloutSample]) -> tuple[torch.Tensor, ...]:
    """ids (B, T), attention mask (B, T), trained (B, C), sampler logprobs (B, C), advantages (B,); prompts end and completions
    begin at the same column. One sample of 2 + 1 and one of 1 + 2 tokens: [p p c .] and [. p c c]."""
    prompts = [len(sample.token_ids) - sample.num_trained_tokens for sample in samples]
    before, after = max(prompts), max(sample.num_trained_tokens for sample in samples)
    ids = torch.zeros(len(samples), before + after, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    trained, old = (torch.zeros(len(samples), after) for _ in range(2))
    for row, (sample, prompt) in enumerate(zip(samples, prompts, strict=True)):
        start, count = before - prompt, sample.num_trained_tokens
        ids[row, start : start + prompt + count] = torch.tensor(sample.token_ids)
        mask[row, start : start + prompt + count] = 1
        trained[row, :count] = 1.0
        old[row, :count] = torch.tensor(sample.sampler_logprobs[prompt:])
    return ids, mask, trained, old, torch.tensor([sample.advantage for sample in samples])


def _grid(samples: Sequence[RolloutSample]) -> tuple[int, int]:
    """Rows and columns that `pad` makes."""
    trained = [sample.num_trained_tokens for sample in samples]
    prompts = [len(sample.token_ids) - count for sample, count in zip(samples, trained, strict=True)]
    return len(samples), max(prompts) + max(trained)
