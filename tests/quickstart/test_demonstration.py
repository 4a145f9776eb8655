"""Demonstrations are, token by token, what a rollout would hold, and only the policy's own tokens are learned."""

from __future__ import annotations

import random
from itertools import islice
from typing import Any

import pytest

from grpo_async.chat import ChatRenderer
from grpo_async.quickstart.demonstration import Demonstration, Turn, calling_turn, pad_batch, segments
from grpo_async.quickstart.model import train_tokenizer
from grpo_async.quickstart.tasks import TASKS

CONVERSATION = Demonstration(
    prompt="1 + 2 =", turns=(calling_turn("calculator", {"expression": "1 + 2"}, "3"), Turn(text="3"))
)


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer(train_tokenizer(["system\nuser\n1 + 2 =\nassistant\n<think>\n"] * 10))


def _messages(shown: Demonstration) -> list[dict[str, Any]]:
    """As a rollout would record it."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": shown.prompt}]
    for turn in shown.turns:
        calls = [call.as_dict() for call in turn.calls]
        messages.append({"role": "assistant", "content": "" if calls else turn.text, "tool_calls": calls})
        messages += [{"role": "tool", "content": result} for result in turn.results]
    return messages


@pytest.mark.parametrize("name", TASKS)
def test_the_pieces_of_a_conversation_join_to_the_rendering_of_its_messages(name: str) -> None:
    task = TASKS[name]
    tokenizer = train_tokenizer(islice(task.vocabulary(), 100))
    renderer, rng = ChatRenderer(tokenizer), random.Random(0)
    for item in task.training_items()[:20]:
        for shown in (task.good(item, rng), task.lazy(item, rng)):
            pieces = segments(renderer, shown, tools=task.tools())
            joined = tokenizer.decode([token for piece in pieces for token in piece.token_ids])
            whole = tokenizer.apply_chat_template(_messages(shown), tools=list(task.tools()) or None, tokenize=False)
            if not shown.is_conversational:
                whole = f"{shown.prompt}{shown.turns[0].text}<|im_end|>\n"
            assert joined + "\n" == whole
            turns = [piece for piece in pieces if piece.learned]
            assert [piece.token_ids[-1] for piece in turns] == [tokenizer.eos_token_id] * len(shown.turns)


@pytest.mark.parametrize("name", ["tool", "game"])
def test_the_parser_of_a_run_reads_the_calls_that_were_shown(name: str) -> None:
    task = TASKS[name]
    renderer = ChatRenderer(train_tokenizer(islice(task.vocabulary(), 100)))
    renderer.check_tools(task.tools())
    shown = task.good(task.training_items()[7], random.Random(0))
    learned = [piece.token_ids for piece in segments(renderer, shown, tools=task.tools()) if piece.learned]
    for number, (turn, token_ids) in enumerate(zip(shown.turns, learned, strict=True)):
        read = renderer.parse(token_ids, turn=number)
        assert read.parse_error is None
        assert [(c.name, dict(c.arguments), c.error) for c in read.tool_calls] == [
            (c.name, dict(c.arguments), None) for c in turn.calls
        ]
        if not turn.calls:
            assert read.content == turn.text


def test_labels_are_the_ids_of_what_is_learned_and_nothing_else(renderer: ChatRenderer) -> None:
    tokenizer = renderer.tokenizer
    rows = [segments(renderer, shown) for shown in (CONVERSATION, Demonstration.of("1 + 1 =", "2"))]
    input_ids, labels = pad_batch(rows, pad_token_id=tokenizer.pad_token_id)
    assert input_ids.shape == labels.shape
    kept = labels != -100
    assert input_ids[kept].tolist() == labels[kept].tolist()
    learned = [tokenizer.decode([int(token) for token in row[row != -100]]) for row in labels]
    call = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1 + 2"}}\n</tool_call><|im_end|>'
    assert learned == [f"{call}3<|im_end|>", "2<|im_end|>"]
    assert input_ids[1, -1] == tokenizer.pad_token_id
    assert tokenizer.decode(input_ids[0]).startswith("<|im_start|>user\n1 + 2 =")
