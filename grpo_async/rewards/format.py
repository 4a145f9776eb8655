"""Rewards for the form of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_async.rewards.text import final_text

_OPEN, _CLOSE = "<think>", "</think>"


def think_format(completions: Sequence[Any], *, opened_by_template: bool = False, **_: Any) -> list[float | None]:
    """1.0 if a completion is `<think>`, some thinking, `</think>`, an answer: each tag once, neither part empty.

    Args:
        completions: plain text or messages.
        opened_by_template: the chat template already ends with `<think>`, so the completion must not open it again.
    """
    return [float(_is_well_formed(final_text(completion), opened_by_template)) for completion in completions]


def _is_well_formed(text: str, opened_by_template: bool) -> bool:
    text = text.strip()
    if not opened_by_template:
        if not text.startswith(_OPEN):
            return False
        text = text[len(_OPEN) :]
    thinking, tag, answer = text.partition(_CLOSE)
    if not tag or _OPEN in text or _CLOSE in answer:
        return False
    return bool(thinking.strip()) and bool(answer.strip())
