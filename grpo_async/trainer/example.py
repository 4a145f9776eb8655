"""What the policy wrote in a step, for people: a good completion and a bad one of the same prompt. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

from grpo_async.records import ScoredGroup
from grpo_async.utils.text import both_ends
from grpo_async.viewer.format import conversation, message_text

_MAX_PROMPT, _MAX_COMPLETION = 300, 1000  # characters


def example_of(groups: Sequence[ScoredGroup]) -> dict[str, Any] | None:
    """An example from the group whose rewards are furthest apart: the last message of its prompt, and the completions with the
    highest and the lowest reward; long texts lose their middle. One completion if all rewards are equal; None without any reward.

    {"prompt": "3 + 4 =", "completions": [{"reward": 1.0, "text": "7"}, {"reward": 0.0, "text": "8"}]}
    """
    found = []
    for group in groups:
        pairs = zip(group.rewards, group.group.trainable, strict=True)
        if rated := [(reward, completion) for reward, completion in pairs if reward is not None]:
            found.append((group.group.prompt, max(rated, key=itemgetter(0)), min(rated, key=itemgetter(0))))
    if not found:
        return None
    prompt, best, worst = max(found, key=lambda each: each[1][0] - each[2][0])
    messages = best[1].prompt_messages or prompt.messages
    return {
        "prompt": both_ends(message_text(messages[-1]) if messages else "", _MAX_PROMPT),
        "completions": [
            {"reward": reward, "text": both_ends(conversation(completion.completion_messages()), _MAX_COMPLETION)}
            for reward, completion in ([best, worst] if best[0] > worst[0] else [best])
        ],
    }
