"""Rewards for the form of a completion."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from grpo_async.records import THINKING
from grpo_async.rewards.call import with_checked_arguments
from grpo_async.rewards.text import last_turns


@with_checked_arguments
def think_format(
    completions: Sequence[Any], *, prompts: Sequence[Any] | None = None, opened_by_template: bool = False, **_: Any
) -> list[float | None]:
    """1.0 if a completion begins with `<think>`, its only one, and has a `</think>` after it, as TRL's `think_format_reward`. The
    tags of Mistral's models, `[THINK]` and `[/THINK]`, are also accepted.

    Args:
        completions: plain text or messages.
        prompts: one that ends with an open `<think>` has begun the thinking, which the completion must not begin again.
        opened_by_template: the same of the chat template; the run sets it where the model's does.
    """
    turns = last_turns(completions, prompts, opened_by_template)
    return [float(any(pattern.match(turn) is not None for pattern in _PATTERNS)) for turn in turns]


_PATTERNS = [
    re.compile(f"{re.escape(opening)}(?!.*{re.escape(opening)}).*?{re.escape(closing)}", re.DOTALL)
    for opening, closing in THINKING
]
