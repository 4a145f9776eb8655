"""TRL's GRPOTrainer as a calculator: its real `_compute_loss`, on an object without model, data or processes."""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections import defaultdict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


@dataclass(frozen=True, kw_only=True)
class TrlBatch:
    """B completions of T tokens, padded; all (B, T) but `advantages` (B,)."""

    mask: torch.Tensor
    logprobs: torch.Tensor
    entropy: torch.Tensor
    old: torch.Tensor
    sampler: torch.Tensor
    ref: torch.Tensor
    advantages: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class TrlResult:
    loss: torch.Tensor
    metrics: dict[str, float]
    correction: torch.Tensor | None = field(default=None)


def trl_loss(
    batch: TrlBatch,
    *,
    loss_type: str,
    level: str = "token",
    epsilon: float = 0.2,
    epsilon_high: float = 0.28,
    delta: float | None = None,
    beta: float = 0.0,
    use_bias_correction_kl: bool = True,
    correction: str | None = None,
    cap: float | None = 3.0,
    floor: float | None = None,
    off_policy_mask: float | None = None,
    entropy_bonus: float = 0.0,
    max_completion_tokens: int = 16,
) -> TrlResult:
    """The loss of one batch on one process without accumulation, and the metrics that TRL logs for it."""
    from accelerate import Accelerator
    from trl import GRPOTrainer
    from trl.experimental.gmpo import GMPOTrainer

    trainer: Any = object.__new__(GMPOTrainer if loss_type == "gmpo" else GRPOTrainer)
    trainer.__dict__.update(
        accelerator=Accelerator(cpu=True),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            delta=delta,
            use_bias_correction_kl=use_bias_correction_kl,
            sapo_temperature_pos=1.0,
            sapo_temperature_neg=1.05,
            vespo_k_pos=2.0,
            vespo_lambda_pos=3.0,
            vespo_k_neg=3.0,
            vespo_lambda_neg=2.0,
            steps_per_generation=1,
        ),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=epsilon,
        epsilon_high=epsilon_high,
        beta=beta,
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=correction is not None,
        vllm_importance_sampling_mode=correction,
        vllm_importance_sampling_clip_max=cap,
        vllm_importance_sampling_clip_min=floor,
        off_policy_mask_threshold=off_policy_mask,
        top_entropy_quantile=1.0,
        _entropy_bonus_enabled=entropy_bonus != 0.0,
        use_adaptive_entropy=False,
        entropy_coef=entropy_bonus,
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=max_completion_tokens,
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (batch.logprobs, batch.entropy, None),
    )
    inputs: dict[str, Any] = {
        "prompt_ids": torch.zeros(len(batch.mask), 1, dtype=torch.int64),
        "prompt_mask": torch.ones(len(batch.mask), 1, dtype=torch.int64),
        "completion_ids": torch.zeros_like(batch.mask),
        "completion_mask": torch.ones_like(batch.mask),
        "tool_mask": batch.mask,
        "advantages": batch.advantages,
        "old_per_token_logps": batch.old,
        "sampling_per_token_logps": batch.sampler,
        "ref_per_token_logps": batch.ref,
        "num_items_in_batch": batch.mask.sum(),
    }
    if correction is not None:
        inputs["importance_sampling_ratio"] = _importance_sampling_ratio(trainer, batch)
    loss = trainer._compute_loss(trainer.model, inputs)
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return TrlResult(loss=loss, metrics=metrics, correction=inputs.get("importance_sampling_ratio"))


def _importance_sampling_ratio(trainer: Any, batch: TrlBatch) -> torch.Tensor:
    """TRL computes it in the middle of the method that generates; its very lines are taken from there and run."""
    from trl import GRPOTrainer

    source = textwrap.dedent(inspect.getsource(GRPOTrainer._generate_and_score_completions))
    blocks = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.If)
        and ast.unparse(node.test) == "self.use_vllm and self.vllm_importance_sampling_correction"
        and "vllm_importance_sampling_ratio = torch.exp" in ast.unparse(node)
    ]
    assert len(blocks) == 1, "TRL's method has changed: find where it computes vllm_importance_sampling_ratio"
    names: dict[str, Any] = {
        "self": trainer,
        "torch": torch,
        "math": math,
        "completion_mask": torch.ones_like(batch.mask),
        "tool_mask": batch.mask,
        "old_per_token_logps": batch.old,
        "sampling_per_token_logps": batch.sampler,
    }
    exec(compile(ast.Module(body=[blocks[0]], type_ignores=[]), "<trl>", "exec"), names)
    ratio: torch.Tensor = names["vllm_importance_sampling_ratio"]
    return ratio
