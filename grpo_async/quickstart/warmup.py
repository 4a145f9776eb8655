r"""The supervised warmup that gives a task a base model worth training.

It must leave a behavior that is right but rare, so that reinforcement learning has something to amplify: for the first
part of the steps every demonstration shows the good way, for the rest only some do and the others show the lazy one. The base
model then knows the good way and mostly does not take it.

A demonstration is shown token by token as the rollouts of a run will build it: prompt ids from the chat template, then for every
turn the policy's text with the end of the turn, then the suffix ids of the results. Each piece is tokenized alone, as in a rollout,
where no text ever joins two pieces.

    prompt   <|im_start|>user\n12 + 7 =<|im_end|>\n<|im_start|>assistant\n              not learned
    turn     <tool_call>\n{"name": "calc", ...}\n</tool_call><|im_end|>                 learned
    suffix   \n<|im_start|>user\n<tool_response>\n19\n</tool_response><|im_end|>\n...   not learned
    turn     19<|im_end|>                                                               learned
"""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

from grpo_async.quickstart.tasks import Demonstration, Task
from grpo_async.records import Origin, TaggedMessage

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import Qwen3ForCausalLM

    from grpo_async.chat import ChatRenderer

Segment: TypeAlias = tuple[list[int], bool]
"""Ids of one piece, and whether the policy writes it: only then is it learned."""
_NOT_LEARNED = -100  # the label that torch's cross entropy leaves out
_REPORT_EVERY_STEPS = 70


def segments(
    renderer: ChatRenderer, demonstration: Demonstration, *, tools: Sequence[Mapping[str, Any]] = ()
) -> list[Segment]:
    """The pieces of a demonstration, in order."""
    prompt = [TaggedMessage(role="user", content=demonstration.prompt, origin=Origin.PROMPT)]
    prompt_ids = renderer.prompt_ids(prompt, is_conversational=True, tools=tools)
    found: list[Segment] = [(prompt_ids, False)]
    tokenizer = renderer.tokenizer
    for turn in demonstration.turns:
        found.append((tokenizer(turn.text + str(tokenizer.eos_token), add_special_tokens=False)["input_ids"], True))
        if turn.call is not None and turn.result is not None:
            found.append((renderer.suffix_ids([turn.call], [turn.call.result_message(turn.result)]), False))
    return found


def pad_batch(batch: Sequence[Sequence[Segment]], *, pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Segments of each demonstration -> input ids, labels, each (B, T), padded on the right.

    Labels are -100 on everything that is not learned, padding included. An attention mask is not needed: attention is
    causal, and nothing that is learned is behind the padding.
    """
    import torch

    rows = [[token for ids, _ in row for token in ids] for row in batch]
    learned = [[token if is_learned else _NOT_LEARNED for ids, is_learned in row for token in ids] for row in batch]
    width = max(map(len, rows))
    input_ids = torch.tensor([row + [pad_token_id] * (width - len(row)) for row in rows])
    labels = torch.tensor([row + [_NOT_LEARNED] * (width - len(row)) for row in learned])
    return input_ids, labels


def warm_up(model: Qwen3ForCausalLM, renderer: ChatRenderer, task: Task, items: Sequence[Any], *, seed: int) -> None:
    """Train `model` in place on demonstrations of `items`; prints a line now and then."""
    import torch

    rng, recipe, tools = random.Random(seed), task.recipe, task.tools()
    pad_token_id = int(renderer.tokenizer.pad_token_id)
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, betas=recipe.betas, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, recipe.lr_factor)
    model.train()
    started = time.monotonic()
    for step in range(recipe.num_steps):
        is_good_only = step < recipe.good_only_fraction * recipe.num_steps
        shown = [
            (task.good if is_good_only or rng.random() < recipe.good_fraction_after else task.lazy)(item, rng)
            for item in rng.choices(items, k=recipe.batch_size)
        ]
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
            print(f"warmup step {step + 1}/{recipe.num_steps}: loss {loss.item():.3f}, {elapsed_s:.0f} s")
    model.eval()
