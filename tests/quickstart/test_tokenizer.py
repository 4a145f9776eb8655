"""The quickstart's tokenizer."""

from __future__ import annotations

import random
from typing import Any

import pytest

from grpo_async.quickstart.model import MAX_VOCABULARY, TAGS, train_tokenizer
from grpo_async.quickstart.tasks.sums import ThinkTask

TASK = ThinkTask()
USER = {"role": "user", "content": "1 + 1 ="}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(TASK.vocabulary())


def test_every_digit_is_a_token_of_its_own_however_often_digits_stand_together() -> None:
    tokenizer = train_tokenizer(["12 + 12 = 24\n"] * 100)
    for text in ("1234567890", " 12", "<think>10 - 25 = -15</think>-15"):
        pieces = [tokenizer.decode([token]) for token in tokenizer.encode(text)]
        assert "".join(pieces) == text
        assert [piece for piece in pieces if any(c.isdigit() for c in piece) and len(piece) > 1] == []


def test_tags_are_single_tokens_that_survive_skipping_special_tokens(tokenizer: Any) -> None:
    for tag in TAGS:
        assert len(tokenizer.encode(tag)) == 1
    ids = tokenizer.encode("<think>1</think>1<|im_end|>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "<think>1</think>1"


def _rendered(tokenizer: Any, *messages: dict[str, Any], **options: Any) -> str:
    return str(tokenizer.apply_chat_template(list(messages), tokenize=False, **options))


def _calls(*arguments: dict[str, Any] | str) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "weather", "arguments": each}} for each in arguments]


def test_calls_and_results_are_rendered_as_hermes_has_them_results_of_one_turn_together(tokenizer: Any) -> None:
    calling = {"role": "assistant", "content": "", "tool_calls": _calls({"town": "Bern"}, {"town": "Rome", "days": 2})}
    results = [{"role": "tool", "content": "rain"}, {"role": "tool", "content": "sun"}]
    text = _rendered(tokenizer, USER, calling, *results, add_generation_prompt=True)
    assert text.removeprefix("<|im_start|>user\n1 + 1 =<|im_end|>\n") == (
        "<|im_start|>assistant\n"
        '<tool_call>\n{"name": "weather", "arguments": {"town": "Bern"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome", "days": 2}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\n<tool_response>\nsun\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_the_vocabulary_is_small_and_a_whole_sample_fits_the_limits_of_the_config(tokenizer: Any) -> None:
    assert len(tokenizer) <= MAX_VOCABULARY
    texts = [TASK.good(item, random.Random(0)).turns[0].text for item in TASK.held_out_items()]
    assert (
        max(len(tokenizer.encode(text)) for text in texts) + 1 <= 40
    )  # with the end of the turn; the config allows 48
