"""The two sides of benchmarks/step.py: a training step of ours, and a plain padded loop around the same Hugging Face model.

Both get the same samples, the same loss (GRPO's clipped ratio with advantages), AdamW, and as many tokens in a micro-batch, padding
included. The plain loop pads prompts on the left and completions on the right, computes logits of completions only, and wraps
the model in DistributedDataParallel where there are several ranks.
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from grpo_async.batching.pack import MicroBatch, split_by_rank
from grpo_async.batching.plan import plan_batch
from grpo_async.batching.weights import token_weights
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
    with tempfile.TemporaryDirectory() as folder:
        if num_ranks > 1:
            dist.init_process_group(backend, timeout=timeout)
        else:
            store = dist.FileStore(f"{folder}/store", 1)
            dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timeout)
        try:
            yield
        finally:
            dist.destroy_process_group()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one step says of itself."""

    loss: float
    grad_norm: float
    computed_tokens: int
    """Of all forwards on all ranks, padding included."""
    num_micro_batches: int
    """Of one rank."""


def make_model(options: argparse.Namespace) -> Any:
    """A Qwen3 with random weights, the same for the same seed. float32: the master weights."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(options.seed)
    config = Qwen3Config(
        vocab_size=options.vocab,
        hidden_size=options.hidden,
        intermediate_size=3 * options.hidden,
        num_hidden_layers=options.layers,
        num_attention_heads=options.heads,
        num_key_value_heads=options.kv_heads,
        head_dim=options.head_dim,
        max_position_embeddings=options.prompt_tokens + options.completion_tokens,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return Qwen3ForCausalLM(config).train()


def make_samples(options: argparse.Namespace) -> list[RolloutSample]:
    """Groups of --group-size samples with one prompt of half to all of --prompt-tokens, and completions of 1/16 to all of
    --completion-tokens, most of them short (the square of an even draw), as those of reasoning models are."""
    draw = np.random.default_rng(options.seed)
    samples = []
    num_prompt = 0
    prompt = np.empty(0, np.int32)
    for number in range(options.samples):
        if number % options.group_size == 0:
            num_prompt = int(draw.integers(max(1, options.prompt_tokens // 2), options.prompt_tokens + 1))
            prompt = draw.integers(options.vocab, size=num_prompt, dtype=np.int32)
        shortest = max(1, options.completion_tokens // 16)
        length = shortest + round((options.completion_tokens - shortest) * draw.random() ** 2)
        is_sampled = np.arange(num_prompt + length) >= num_prompt
        logprobs = draw.normal(-math.log(options.vocab), 0.1, num_prompt + length)
        samples.append(
            RolloutSample(
                group_id=number // options.group_size,
                rollout_id=str(number),
                token_ids=np.concatenate([prompt, draw.integers(options.vocab, size=length, dtype=np.int32)]),
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
    """plan -> pack -> train_step, as the trainer's loop does it, on the shards of FSDP.

    Args:
        num_ranks: of this process group; every rank plans for all of them and packs its own part.
    """

    def __init__(self, options: argparse.Namespace, device: torch.device, *, rank: int, num_ranks: int) -> None:
        self._options, self._device, self._rank, self._num_ranks = options, device, rank, num_ranks
        dtype = getattr(torch, options.dtype)
        model = make_model(options)
        attention, _ = choose_attention("auto", device=device, dtype=dtype, config=model.config)
        self.policy = Policy(model, temperature=1.0, chunk_tokens=options.chunk, attention=attention)
        shard_policy(self.policy, make_mesh(device.type, world_size=num_ranks), compute_dtype=dtype)
        self.optimizer = make_optimizer(self.policy, OptimizerSection(lr=LR))
        self._objective = Objective(
            ClippedLoss(type="dapo", epsilon=EPSILON, epsilon_high=EPSILON), num_updates=options.minibatches
        )

    def step(self, samples: Sequence[RolloutSample]) -> StepOutcome:
        """One step of --minibatches updates. A collective."""
        options = self._options
        minibatches: list[list[MicroBatch]] = []
        computed = num_micro_batches = 0
        for part in split(samples, options.minibatches):
            plan = plan_batch(
                [len(sample.token_ids) for sample in part],
                num_ranks=self._num_ranks,
                micro_batch_tokens=options.micro_batch_tokens,
                pack=True,
            )
            weights = token_weights(part, plan, reduction="dapo", max_completion_tokens=options.completion_tokens)
            minibatches.append(split_by_rank(part, weights, plan, trainer_version=0)[self._rank].pack())
            computed += plan.num_computed_tokens
            num_micro_batches += plan.num_micro_batches
        result = train_step(
            self.policy,
            self.optimizer,
            minibatches,
            objective=self._objective,
            reference=None,
            lr=LR,
            max_grad_norm=MAX_NORM,
            device=self._device,
        )
        return StepOutcome(
            loss=result.loss,
            grad_norm=result.grad_norm,
            computed_tokens=computed,
            num_micro_batches=num_micro_batches,
        )


class PlainSide:
    """A padded loop.

    Args:
        is_sorted: samples of like length go into one micro-batch, which few plain loops do and which pads less.
    """

    def __init__(
        self, options: argparse.Namespace, device: torch.device, *, rank: int, num_ranks: int, is_sorted: bool
    ) -> None:
        self._options, self._device, self._rank, self._num_ranks = options, device, rank, num_ranks
        self._is_sorted = is_sorted
        self._dtype = getattr(torch, options.dtype)
        model = make_model(options).to(device)
        self._plain = model
        self._model = nn.parallel.DistributedDataParallel(model) if num_ranks > 1 else model
        section = OptimizerSection()
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=LR, betas=section.betas, eps=section.eps, weight_decay=section.weight_decay
        )

    def step(self, samples: Sequence[RolloutSample]) -> StepOutcome:
        """One step of --minibatches updates. A collective."""
        losses, norms, computed, num_micro_batches = [], [], 0, 0
        for part in split(samples, self._options.minibatches):
            batches = self._cut(part)
            computed += sum(rows * length for rows, length in map(_grid, (batch for rank in batches for batch in rank)))
            num_micro_batches += len(batches[self._rank])
            loss, norm = self._update(batches[self._rank], sum(sample.num_trained_tokens for sample in part))
            losses.append(loss)
            norms.append(norm)
        return StepOutcome(
            loss=sum(losses) / len(losses),
            grad_norm=sum(norms) / len(norms),
            computed_tokens=computed,
            num_micro_batches=num_micro_batches,
        )

    def _cut(self, samples: Sequence[RolloutSample]) -> list[list[list[RolloutSample]]]:
        """Micro-batches of each rank: every n-th sample, as many as fit with their padding. [num_ranks][any]"""
        ordered = sorted(samples, key=lambda s: -len(s.token_ids)) if self._is_sorted else list(samples)
        ranks = []
        for rank in range(self._num_ranks):
            batches: list[list[RolloutSample]] = [[]]
            for sample in ordered[rank :: self._num_ranks]:
                rows, length = _grid([*batches[-1], sample])
                if batches[-1] and rows * length > self._options.micro_batch_tokens:
                    batches.append([])
                batches[-1].append(sample)
            ranks.append(batches)
        return ranks

    def _update(self, batches: Sequence[Sequence[RolloutSample]], num_tokens: int) -> tuple[float, float]:
        total = torch.zeros((), device=self._device)
        for number, samples in enumerate(batches):
            tensors = [tensor.to(self._device) for tensor in pad(samples)]
            is_last = number == len(batches) - 1
            if self._num_ranks > 1:
                self._model.require_backward_grad_sync = is_last  # what `no_sync` sets
            loss = self._loss(*tensors) / num_tokens
            # DistributedDataParallel averages over ranks
            (loss * self._num_ranks).backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self._num_ranks > 1:
            dist.all_reduce(total)
        norm = nn.utils.clip_grad_norm_(self._plain.parameters(), MAX_NORM)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return float(total), float(norm)

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


def split(samples: Sequence[RolloutSample], num_minibatches: int) -> list[Sequence[RolloutSample]]:
    """Neighbors, in parts of equal size (the last one may be smaller)."""
    size = -(-len(samples) // num_minibatches)
    return [samples[start : start + size] for start in range(0, len(samples), size)]


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
