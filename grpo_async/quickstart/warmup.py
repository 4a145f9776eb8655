"""The supervised warmup that gives a task a base model worth training.

It must leave a behavior that is right but rare, so that reinforcement learning has something to amplify: for the first
part of the steps every demonstration shows the good way, for the rest only some do and the others show the lazy one. The base
model then knows the good way and mostly does not take it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from grpo_async.quickstart.demonstration import Demonstration, pad_batch, segments
from grpo_async.quickstart.tasks.base import Task, WarmupRecipe

if TYPE_CHECKING:
    from transformers import Qwen3ForCausalLM

    from grpo_async.chat import ChatRenderer

Item = TypeVar("Item")
_REPORT_EVERY_STEPS = 70


def demonstration(task: Task[Item], item: Item, step: int, recipe: WarmupRecipe, rng: random.Random) -> Demonstration:
    """What the model is shown for `item` at 0-based `step`."""
    if step < recipe.good_only_fraction * recipe.num_steps or rng.random() < recipe.good_fraction_after:
        return task.good(item, rng)
    return task.lazy(item, rng)


def warm_up(
    model: Qwen3ForCausalLM,
    renderer: ChatRenderer,
    task: Task[Any],
    items: Sequence[Any],
    *,
    recipe: WarmupRecipe,
    seed: int,
    report: Callable[[str], None],
) -> None:
    """Train `model` in place on demonstrations of `items`; `report` gets a line now and then."""
    import torch

    rng = random.Random(seed)
    tools = task.tools()
    pad_token_id = int(renderer.tokenizer.pad_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.lr_factor)
    model.train()
    started = time.monotonic()
    for step in range(recipe.num_steps):
        batch = rng.choices(items, k=recipe.batch_size)
        shown = [demonstration(task, item, step, recipe, rng) for item in batch]
        rows = [segments(renderer, each, tools=tools) for each in shown]
        input_ids, labels = pad_batch(rows, pad_token_id=pad_token_id)
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % _REPORT_EVERY_STEPS == 0 or step + 1 == recipe.num_steps:
            elapsed_s = time.monotonic() - started
            report(f"warmup step {step + 1}/{recipe.num_steps}: loss {loss.item():.3f}, {elapsed_s:.0f} s")
    model.eval()
