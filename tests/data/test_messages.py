"""The column `prompt`: its one form, and the words of every error."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_async.data.messages import check_prompt
from grpo_async.errors import ConfigError

USER = {"role": "user", "content": "q"}


def _checked(*messages: Any) -> Any:
    return check_prompt({"prompt": list(messages)}, "f:1", set())


def test_a_call_without_content_and_its_answer_pass() -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    answer = {"role": "tool", "content": "1", "name": "add", "tool_call_id": "abcdefghi"}
    for content in ({}, {"content": None}):
        assert _checked(USER, {"role": "assistant", "tool_calls": [call], **content}, answer) == [
            USER,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            answer,
        ]


def test_arguments_as_json_text_become_an_object_and_a_flat_call_the_openai_form() -> None:
    wanted = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    for call in (
        {"name": "add", "arguments": '{"a": 1}'},
        {"function": {"name": "add", "arguments": '{"a": 1}'}},
        {"function": {"name": "add", "arguments": {"a": 1}}, "id": None},
    ):
        assert _checked({"role": "assistant", "tool_calls": [call]})[0]["tool_calls"] == [wanted]


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}]
    assert _checked({"role": "user", "content": parts}) == [{"role": "user", "content": "2+2"}]


def test_null_keys_count_as_missing_and_unused_ones_are_collected() -> None:
    unused: set[str] = set()
    message = {"role": "user", "content": "q", "tool_calls": None, "name": None, "weight": None, "id": 7}
    assert check_prompt({"prompt": [message]}, "f:1", unused) == [USER]
    assert unused == {"id"}


def test_an_empty_message_passes_for_an_environment_may_supply_the_text() -> None:
    assert _checked({"role": "user", "content": ""}) == [{"role": "user", "content": ""}]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ({"role": "user", "content": [{"type": "image", "url": "x"}]}, "`content[0]` has the type 'image'; only text"),
        (
            {"role": "user", "content": [{"type": "text", "text": None}]},
            "the `text` of `content[0]` must be text, got null",
        ),
        ({"role": "user", "content": None}, "has a `content` that is null; only a message with `tool_calls`"),
        ({"role": "assistant", "content": "a", "tool_calls": {}}, "its `tool_calls` must be a list, got an object"),
        ({"role": "user", "content": "a", "tool_calls": [{"name": "f"}]}, "of role `user` has `tool_calls`"),
        ({"role": "assistant", "tool_calls": ["f"]}, "`tool_calls[0]` must be"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{"}]}, "text that is not valid JSON"),
        ({"role": "assistant", "tool_calls": [{"name": "f", "arguments": "[1]"}]}, "`arguments` must be an object"),
        ({"role": "tool", "content": "a", "tool_call_id": 7}, "its `tool_call_id` must be text, got a number (7)"),
        ({"role": None, "content": "a"}, "has no `role`"),
    ],
)
def test_a_bad_message_is_named_with_its_place(message: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _checked(USER, message)
    assert str(caught.value).startswith("f:1: `prompt[1]`")
    assert words in str(caught.value)
