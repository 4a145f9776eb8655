"""The column `prompt`, checked and brought into one form: text, or a list of messages.

A message is {role, content}; an assistant's may carry `tool_calls` (then its content may be missing), a tool's a `name` and a
`tool_call_id`. Worked example:

    {"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2"}], "name": null, "id": 7}
    -> {"role": "user", "content": "2+2"}, and `id` is reported as a key that nothing uses

    {"name": "add", "arguments": "{\"a\": 2}"}
    -> {"type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
"""

from __future__ import annotations

from typing import Any

from grpo_async.data.rows import Row
from grpo_async.errors import ConfigError
from grpo_async.utils.safe_text import SURROGATE
from grpo_async.utils.strict_json import UnreadableError, arguments_of
from grpo_async.utils.text import backticked, json_kind, text_of_parts

_CONVERSATIONS = ("messages", "conversations", "conversation", "chosen", "rejected")
_KEYS = ("role", "content", "tool_calls", "name", "tool_call_id")


def check_prompt(row: Row, location: str, unused: set[str]) -> Any:
    """The prompt of a row in its one form; keys of messages that nothing uses are added to `unused`."""
    if "prompt" not in row:
        remedy = "Rename the one that holds the prompt, for example `columns: {problem: prompt}`"
        if whole := [name for name in _CONVERSATIONS if name in row]:
            remedy = f"{backticked(whole)} may hold the answer, too; docs/howto/data.md shows how to take it out"
        raise ConfigError(f"{location}: there is no column `prompt`; the columns are {backticked(row)}. {remedy}")
    prompt = row["prompt"]
    if isinstance(prompt, str):
        if not prompt.strip():
            raise ConfigError(f"{location}: `prompt` is empty text; fill it in or remove the row")
        return _tokenizable(prompt, f"{location}: `prompt`")
    if not isinstance(prompt, list):
        raise ConfigError(
            f"{location}: `prompt` must be text or a list of {{role, content}} messages, got {json_kind(prompt)}"
        )
    if not prompt:
        raise ConfigError(
            f"{location}: `prompt` is a list without messages; give at least one {{role, content}} message"
        )
    return [_message(message, f"{location}: `prompt[{index}]`", unused) for index, message in enumerate(prompt)]


def _message(message: Any, where: str, unused: set[str]) -> Row:
    if not isinstance(message, dict):
        raise ConfigError(f"{where} must be a {{role, content}} message, got {json_kind(message)}")
    given = {key: value for key, value in message.items() if value is not None}  # Parquet fills missing keys with null
    unused.update(given.keys() - set(_KEYS))
    if "role" not in given:
        raise ConfigError(f"{where} has no `role` (it has {backticked(message)}); a message is {{role, content}}")
    for key in ("role", "name", "tool_call_id"):
        if key in given and not isinstance(given[key], str):
            raise ConfigError(f"{where}: its `{key}` must be text, got {json_kind(given[key])}")
    calls = _tool_calls(given, where)
    if "content" not in given and not calls:
        has = "a `content` that is null" if "content" in message else f"no `content` (it has {backticked(message)})"
        raise ConfigError(f"{where} has {has}; only a message with `tool_calls` may go without")
    checked: Row = {"role": given["role"], "content": _text(given.get("content", ""), where)}
    if calls:
        checked["tool_calls"] = calls
    return checked | {key: given[key] for key in ("name", "tool_call_id") if key in given}


def _text(content: Any, where: str) -> str:
    """Content is text, or a list of {"type": "text", "text": ...} parts, which are joined."""
    if isinstance(content, str):
        return _tokenizable(content, f"{where}: its `content`")
    if not isinstance(content, list):
        raise ConfigError(f"{where}: its `content` must be text or a list of text parts, got {json_kind(content)}")
    try:
        return _tokenizable(text_of_parts(content), f"{where}: its `content`")
    except ValueError as error:
        raise ConfigError(f"{where}: its `content` cannot be used: {error}") from error


def _tokenizable(text: str, what: str) -> str:
    if half := SURROGATE.search(text):
        raise ConfigError(f"{what} holds {half[0]!a}, half a character, which no tokenizer takes; remove it")
    return text


def _tool_calls(message: Row, where: str) -> list[Row]:
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list):
        raise ConfigError(f"{where}: its `tool_calls` must be a list, got {json_kind(calls)}")
    if calls and message["role"] != "assistant":
        raise ConfigError(f"{where}: a message of role `{message['role']}` has `tool_calls`; only an assistant's may")
    return [_tool_call(call, f"{where}: `tool_calls[{number}]`") for number, call in enumerate(calls)]


def _tool_call(call: Any, where: str) -> Row:
    """In the OpenAI form with `arguments` as an object, which is what chat templates take."""
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ConfigError(
            f'{where} must be {{"function": {{"name": ..., "arguments": {{...}}}}}}, got {json_kind(call)}'
        )
    try:
        arguments = arguments_of(function.get("arguments"))
    except UnreadableError as error:
        raise ConfigError(f"{where}: its `arguments` cannot be used: {error}") from error
    identity = {"id": call["id"]} if call.get("id") is not None else {}
    return {**identity, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
