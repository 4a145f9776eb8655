"""What a user's own module would hold: a parser for a model that knows no tool calls, and rollout functions."""

from __future__ import annotations

from typing import Any


def parse(text: str) -> dict[str, Any]:
    """Guesses or increments by the length of the text; text with a 9 in it is an answer."""
    if "9" in text:
        return {"content": text, "tool_calls": []}
    if len(text) % 2 == 0:
        call = {"name": "guess", "arguments": {"guess": "crane" if len(text) % 4 == 0 else "trace"}}
    else:
        call = {"name": "increment", "arguments": {"step": len(text) % 5}}
    return {"content": text, "tool_calls": [call]}


def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, Any]:
    """As written for TRL: generate, and give the rewards a column."""
    outputs = trainer.generate(prompts)
    return {
        "prompt_ids": [output["prompt_ids"] for output in outputs],
        "completion_ids": [output["completion_ids"] for output in outputs],
        "logprobs": [output["logprobs"] for output in outputs],
        "seen_step": [trainer.state.global_step] * len(prompts),
        "number_of_prompts": len(prompts),
    }


def step_is_known(
    completions: list[Any], seen_step: list[int], number_of_prompts: list[int], trainer_state: Any, **_: Any
) -> list[float]:
    """1.0 if the function saw the step whose weights are served: with staleness 0 that is the step being made."""
    return [
        float(step == trainer_state.global_step and count % 4 == 0)
        for step, count in zip(seen_step, number_of_prompts, strict=True)
    ]
