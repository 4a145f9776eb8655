"""Tiny random models for the tests of loading, sharding and steps, and a step of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_async.batching.pack import MicroBatch
from grpo_async.config.sections import BaseLoss, ModelSection, OptimizerSection
from grpo_async.training.load import load_policy
from grpo_async.training.loss import Objective
from grpo_async.training.model import Policy
from grpo_async.training.optimizer import make_optimizer
from grpo_async.training.parameters import ShardedParameters
from grpo_async.training.step import StepResult, train_step

SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 32,
}  # fmt: skip


def save_model(
    folder: Path, family: str, *, tied: bool = False, seed: int = 0, dtype: str = "float32", **settings: Any
) -> Path:
    """Write a random model of a family (qwen3, qwen3_moe, gemma, gpt_oss) and return the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(seed)
    sizes = {**SIZES, **settings}
    if family == "qwen3_moe":
        sizes |= {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2}
    config = AutoConfig.for_model(family, **sizes, tie_word_embeddings=tied, initializer_range=0.08)
    AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
    return folder


def collect(parameters: ShardedParameters, bucket_bytes: int = 1 << 16) -> dict[str, torch.Tensor]:
    """Copies of everything that would be sent, by name, in its order."""
    tensors = [tensor for bucket in parameters.buckets(bucket_bytes) for tensor in bucket]
    assert all(tensor.is_contiguous() for tensor in tensors)
    copies = (tensor.clone() for tensor in tensors)  # they may be the model's own
    return dict(zip((spec.name for spec in parameters.specs), copies, strict=True))


def load_tiny(folder: Path | str, *, temperature: float = 1.0, **section: Any) -> Policy:
    """The policy of a folder, in this process alone, with chunks of 16 tokens."""
    model = ModelSection(path=str(folder), **section)
    return load_policy(model, temperature=temperature, chunk_tokens=16, max_model_len=256)


def sum_of_logprobs(logprobs: torch.Tensor, entropy: torch.Tensor, *_: object) -> torch.Tensor:
    """An objective for `Policy.forward`."""
    return logprobs.sum()


def build_tiny(folder: Path) -> tuple[Policy, torch.optim.Optimizer]:
    """The policy of a folder, in this process alone, and its optimizer."""
    policy = load_tiny(folder)
    return policy, make_optimizer(policy, OptimizerSection(lr=1e-2))


def step_alone(
    policy: Policy,
    optimizer: torch.optim.Optimizer,
    minibatches: Sequence[Sequence[MicroBatch]],
    section: BaseLoss,
    **more: Any,
) -> StepResult:
    """One training step of a policy that is not sharded."""
    objective = Objective(section, num_updates=len(minibatches) * more.get("num_iterations", 1))
    settings: dict[str, Any] = {
        "reference": None, "lr": 1e-2, "max_grad_norm": 0.5, "device": torch.device("cpu"), **more,
    }  # fmt: skip
    return train_step(policy, optimizer, minibatches, objective=objective, **settings)
