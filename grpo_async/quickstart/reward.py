"""The tiny tasks' reward: is the final text the answer? Signature as in TRL's GRPOTrainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

THINKING_ENDS = "</think>"


def exact_answer(
    prompts: Sequence[Any],
    completions: Sequence[str | Sequence[Mapping[str, Any]]],
    completion_ids: Sequence[Sequence[int]],
    answer: Sequence[str],
    **columns: Any,
) -> list[float]:
    """1.0 where what follows `</think>` (without it: the whole text) is the answer, surrounding spaces aside; else 0.0.

    `<think>3+4=7\\n7-2=5</think>5` with answer `5` -> 1.0; `5` -> 1.0; `<think>3+4=7` (cut while thinking) -> 0.0.
    A conversation is judged by its last message. One that ends in a tool's result, or in a call, has no answer: 0.0.
    """
    scores = []
    for completion, expected in zip(completions, answer, strict=True):
        text = completion if isinstance(completion, str) else _last_words(completion)
        final_text = text.rpartition(THINKING_ENDS)[2].strip()
        scores.append(float(final_text == str(expected)))
    return scores


def _last_words(messages: Sequence[Mapping[str, Any]]) -> str:
    """What the assistant says last; "" when somebody else's message is the last, or nothing was said beside a call."""
    if not messages or messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
        return ""
    return str(messages[-1]["content"] or "")
