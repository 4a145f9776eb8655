"""The learning rate over the steps of a run: a warmup, then one of transformers' schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError


def lr_factors(config: ExperimentConfig) -> Callable[[int], float]:
    """The factor on `optimizer.lr` by 0-based step; a function of the step alone, so a resume needs no state of it.

    Warmup: (step + 1) / warmup_steps. (transformers begins at 0, which wastes the first step.) Then the schedule begins, and
    ends at the run's last step. With 10 steps, 2 of warmup and `linear`: 0.5, 1, 1, 0.875, 0.75, ..., 0.125."""
    warmup = config.warmup_steps
    after = _after_warmup(config)
    return lambda step: (step + 1) / warmup if step < warmup else after(step - warmup)


def _after_warmup(config: ExperimentConfig) -> Callable[[int], float]:
    optimizer, name = config.optimizer, config.optimizer.schedule
    floor = optimizer.min_lr_ratio
    defaults: dict[str, tuple[str, dict[str, float | None]]] = {
        "linear": ("polynomial", {"lr_end": floor * optimizer.lr}),
        "cosine": ("cosine_with_min_lr", {"min_lr_rate": floor}),
        "polynomial": (name, {"lr_end": floor * optimizer.lr}),
        "warmup_stable_decay": (name, {"min_lr_ratio": floor}),
        "inverse_sqrt": (name, {"timescale": config.warmup_steps or None}),
    }
    scheduler_name, arguments = defaults.get(name, (name, {}))
    arguments = {**arguments, **optimizer.schedule_kwargs}
    if name == "constant" and arguments:
        raise ConfigError("optimizer.schedule_kwargs: constant takes none; set optimizer.schedule, or leave them out")
    if name == "constant" or arguments.get("lr_end") == optimizer.lr:  # which transformers refuses
        return lambda step: 1.0
    import torch
    from transformers.optimization import get_scheduler

    dummy: Any = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=optimizer.lr)
    try:
        scheduler = get_scheduler(
            scheduler_name,
            dummy,
            num_warmup_steps=0,
            num_training_steps=max(1, config.num_steps - config.warmup_steps),
            scheduler_specific_kwargs=arguments,
        )
        factor: Callable[[int], float] = scheduler.lr_lambdas[0]
        factor(0)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optimizer.schedule_kwargs: {name} cannot be created with {optimizer.schedule_kwargs}: {error}"
        ) from error
    return factor
