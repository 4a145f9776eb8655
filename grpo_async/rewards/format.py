"""Rewards for the form of a completion."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grpo_async.records import THINKING
from grpo_async.rewards.call import with_checked_arguments
from grpo_async.rewards.text import final_text


@with_checked_arguments
def think_format(completions: Sequence[Any], *, opened_by_template: bool = False, **_: Any) -> list[float | None]:
    """1.0 if a completion is `<think>`, some thinking, `</think>`, an answer: each tag once, neither part empty. The tags of
    Mistral's models, `[THINK]` and `[/THINK]`, are also accepted.

    Args:
        completions: plain text or messages.
        opened_by_template: the chat template already ends with `<think>`, so the completion must not open it again.
    """
    texts = [final_text(completion).strip() for completion in completions]
    return [float(any(_is_well_formed(text, *tags, opened_by_template) for tags in THINKING)) for text in texts]


def _is_well_formed(text: str, opening: str, closing: str, opened_by_template: bool) -> bool:
    if not opened_by_template:
        if not text.startswith(opening):
            return False
        text = text[len(opening) :]
    thinking, tag, answer = text.partition(closing)
    if not tag or opening in text or closing in answer:
        return False
    return bool(thinking.strip()) and bool(answer.strip())
