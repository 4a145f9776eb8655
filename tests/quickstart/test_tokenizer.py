"""The quickstart's tokenizer."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_async.quickstart.model import TAGS, train_tokenizer
from grpo_async.quickstart.tasks.sums import ThinkTask

TASK = ThinkTask()
USER = {"role": "user", "content": "1 + 1 ="}


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_tokenizer(TASK.vocabulary())


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
