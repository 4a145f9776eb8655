"""Demonstrations are, token by token, what a rollout would hold, and only the policy's own tokens are learned."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest

from grpo_async.chat import ChatRenderer
from grpo_async.quickstart.model import train_tokenizer
from grpo_async.quickstart.prepare import segments
from grpo_async.quickstart.tasks import TASKS, Demonstration


def _messages(shown: Demonstration) -> list[dict[str, Any]]:
    """As a rollout would record it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": shown.prompt}]
    for turn in shown.turns:
        calls = [] if turn.call is None else [turn.call.as_dict()]
        messages.append({"role": "assistant", "content": "" if calls else turn.text, "tool_calls": calls})
        messages += [] if turn.result is None else [{"role": "tool", "content": turn.result}]
    return messages


@pytest.mark.parametrize("name", TASKS)
def test_the_pieces_of_a_conversation_join_to_the_rendering_of_its_messages(name: str) -> None:
    task = TASKS[name]
    tokenizer = train_tokenizer(islice(task.vocabulary(), 100))
    renderer, rng = ChatRenderer(tokenizer), random.Random(0)
    for item in task.training_items()[:20]:
        for shown in (task.good(item, rng), task.lazy(item, rng)):
            pieces = segments(renderer, shown, tools=task.tools())
            joined = tokenizer.decode([token for ids, _ in pieces for token in ids])
            whole = tokenizer.apply_chat_template(_messages(shown), tools=list(task.tools()) or None, tokenize=False)
            assert joined + "\n" == whole
            assert [ids[-1] for ids, is_learned in pieces if is_learned] == [tokenizer.eos_token_id] * len(shown.turns)
