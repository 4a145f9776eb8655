r"""The supervised warm-up that gives the quickstart a base model worth training.

It must leave a behaviour that is right but rare, so that reinforcement learning has something to amplify: for the first
seven eighths of the steps every demonstration thinks in steps, for the rest only 30% do and the others leave the thinking
empty and guess near the answer. The base model then knows the good way and mostly does not take it.

    thinks   3 + 4 - 2 + 1 =   ->   <think>3 + 4 = 7\n7 - 2 = 5\n5 + 1 = 6</think>6
    guesses  3 + 4 - 2 + 1 =   ->   <think></think>9                              (the answer +- 0..9)
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from grpo_async.quickstart.task import ChainSum

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmupRecipe:
    """How the base model is made. The marker of a prepared folder holds these numbers."""

    num_steps: int = 280
    batch_size: int = 32
    lr: float = 4e-3
    betas: tuple[float, float] = (0.9, 0.98)
    lr_warmup_steps: int = 20
    min_lr_ratio: float = 0.1
    thinking_only_share: float = 0.875
    """Of the steps: so many, from the first, in which every demonstration thinks."""
    thinking_share_after: float = 0.3
    """Of the demonstrations in the steps after those: so many think, the others guess."""
    max_guess_error: int = 9

    def lr_factor(self, step: int) -> float:
        """Linear warm-up, then cosine from 1 to `min_lr_ratio` at the last step."""
        if step < self.lr_warmup_steps:
            return (step + 1) / self.lr_warmup_steps
        progress = (step - self.lr_warmup_steps) / max(1, self.num_steps - self.lr_warmup_steps)
        return self.min_lr_ratio + (1.0 - self.min_lr_ratio) * (1.0 + math.cos(math.pi * progress)) / 2.0


def thinking(item: ChainSum) -> str:
    """The good way: the steps, then the answer."""
    return "<think>" + "\n".join(item.steps) + f"</think>{item.answer}"


def guess(item: ChainSum, error: int) -> str:
    """The lazy way: no thinking, and a number near the answer."""
    return f"<think></think>{item.answer + error}"


def demonstration(item: ChainSum, step: int, recipe: WarmupRecipe, rng: random.Random) -> str:
    """What the model is shown for `item` at 0-based `step`."""
    if step < recipe.thinking_only_share * recipe.num_steps or rng.random() < recipe.thinking_share_after:
        return thinking(item)
    return guess(item, rng.randint(-recipe.max_guess_error, recipe.max_guess_error))


def encode_batch(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """(prompt, completion) texts -> input ids, labels, each (B, T), padded on the right.

    Labels are -100 on the prompt and the padding, so only assistant tokens are learned, the end of the turn included. An
    attention mask is not needed: attention is causal, and nothing that is learned stands behind the padding.
    """
    import torch

    prompts = [
        tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True)
        for prompt, _ in pairs
    ]
    prompt_ids = tokenizer(prompts, add_special_tokens=False)["input_ids"]
    completion_ids = tokenizer([text + str(tokenizer.eos_token) for _, text in pairs], add_special_tokens=False)[
        "input_ids"
    ]
    rows = list(zip(prompt_ids, completion_ids, strict=True))
    width = max(len(prompt) + len(completion) for prompt, completion in rows)
    input_ids = torch.full((len(rows), width), int(tokenizer.pad_token_id))
    labels = torch.full((len(rows), width), -100)
    for index, (prompt, completion) in enumerate(rows):
        end = len(prompt) + len(completion)
        input_ids[index, :end] = torch.tensor(prompt + completion)
        labels[index, len(prompt) : end] = torch.tensor(completion)
    return input_ids, labels


def warm_up(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    sums: Sequence[ChainSum],
    *,
    recipe: WarmupRecipe,
    seed: int,
    report: Callable[[str], None],
) -> None:
    """Train `model` in place on demonstrations of `sums`; `report` gets a line now and then."""
    import torch

    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.lr_factor)
    model.train()
    started = time.monotonic()
    for step in range(recipe.num_steps):
        batch = rng.choices(sums, k=recipe.batch_size)
        pairs = [(item.prompt, demonstration(item, step, recipe, rng)) for item in batch]
        input_ids, labels = encode_batch(tokenizer, pairs)
        loss = model(input_ids=input_ids, labels=labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 70 == 0 or step + 1 == recipe.num_steps:
            elapsed_s = time.monotonic() - started
            report(f"warm-up step {step + 1}/{recipe.num_steps}: loss {loss.item():.3f}, {elapsed_s:.0f} s")
    model.eval()
