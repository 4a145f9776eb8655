"""The formats in which models write tool calls, one class each. They never raise, whatever the policy wrote: a call that cannot be
read becomes a `ToolCall` whose `error` says what was wrong and how to write it.

A format declares the special tokens that it needs to see (`special_tokens`); all others are removed from the text it reads. Where
the turn begins with thinking, only what follows is searched: a call that the model merely considers is not made.

A parser of the user's own (`tool_calling.parser`): `module:attribute` of

    parse(text) -> {"content": "I look.", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}

It may also return the list of calls alone (the text then stays the content), calls in the OpenAI form ({"function": {...}}),
and None or an empty list for no calls. It runs on the event loop, so it should be quick. What it raises, and calls that JSON cannot
hold, are the turn's parse error: the whole text is then the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from grpo_async.chat.json_calls import calls_of, named_call
from grpo_async.chat.turn import ParsedTurn, SampledTurn
from grpo_async.errors import ConfigError
from grpo_async.records import ToolCall, answer_start
from grpo_async.user_code.references import resolve_and_check
from grpo_async.utils.strict_json import UnreadableError, read_json, scan_json
from grpo_async.utils.text import backticked, did_you_mean, json_kind

_NAME_IN_JSON = re.compile(r'"name"\s*:\s*"([^"\\]{1,128})"')  # of a call that cannot be read


class Format(Protocol):
    """Reads the calls of one turn."""

    @property
    def special_tokens(self) -> Sequence[str]:
        """Special tokens that stay in the `marked_text` it is given."""
        ...

    def read(self, turn: SampledTurn) -> ParsedTurn:
        """The calls, and the text without them. May raise only if it is the user's own."""
        ...


class Hermes:
    """Hermes, Qwen2.5, Qwen3: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number of them."""

    special_tokens = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    how = 'write <tool_call>{"name": "...", "arguments": {...}}</tool_call>'

    def read(self, turn: SampledTurn) -> ParsedTurn:
        return _read_blocks(turn, self.special_tokens[0], self._block)

    def _block(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        """The calls of the block whose inside begins at `start`, and the position after the block."""
        opening, closing = self.special_tokens[:2]
        name = ""
        try:
            value, end = scan_json(text, start)
        except UnreadableError as error:
            end, problem = start, str(error)
        else:
            calls = calls_of(value)
            after = len(text) - len(text[end:].lstrip())
            if text.startswith(closing, after):
                return explained(calls, self.how), after + len(closing)
            name = calls[0].name if calls else ""
            problem = f"there is more text after the JSON: {text[after : after + 24]!r}"
        close, following = text.find(closing, end), text.find(opening, end)
        if close < 0 or 0 <= following < close:
            problem, close = f"it is not closed, {closing} is missing", following if following >= 0 else len(text)
            position = close
        else:
            position = close + len(closing)
        named = _NAME_IN_JSON.search(text, start, position)
        return [_failed(name or (named[1] if named else ""), problem, self.how)], position


class Llama3Json:
    """Llama 3: {"name": "add", "parameters": {"a": 1}} is the whole turn, or follows <|python_tag|>; several are separated by
    `;`, or are in a list. Without the tag, JSON that is not a call is an answer like any other."""

    special_tokens = ("<|python_tag|>",)
    how = 'write {"name": "...", "parameters": {...}} and nothing else'
    _BEGINS_LIKE_A_CALL = re.compile(r'\s*\[?\s*\{\s*"(?:name"\s*:|type"\s*:\s*"function")')

    def read(self, turn: SampledTurn) -> ParsedTurn:
        text, tag = turn.marked_text, self.special_tokens[0]
        start = answer_start(text, is_open=turn.thinking_is_open)
        tagged = text.find(tag, start)
        if tagged < 0 and text[start:].lstrip()[:1] not in ("{", "["):
            return ParsedTurn(content=turn.text)
        outside = text[: tagged if tagged >= 0 else start]
        position = tagged if tagged >= 0 else start
        calls: list[ToolCall] = []
        while True:
            position = self._skip_separators(text, position)
            if position >= len(text) or (calls and text[position] not in "{["):
                break
            try:
                value, end = scan_json(text, position)
            except UnreadableError as error:
                if tagged < 0 and not calls and not self._BEGINS_LIKE_A_CALL.match(text, position):
                    return ParsedTurn(content=turn.text)
                named = _NAME_IN_JSON.search(text, position)
                calls.append(_failed(named[1] if named else "", str(error), self.how))
                position = len(text)
                break
            if tagged < 0 and not _looks_like_calls(value):
                if not calls:
                    return ParsedTurn(content=turn.text)
                break
            calls += explained(calls_of(value), self.how)
            position = end
        return ParsedTurn(content=joined([outside, text[position:]]), calls=calls)

    def _skip_separators(self, text: str, position: int) -> int:
        tag = self.special_tokens[0]
        while position < len(text):
            if text.startswith(tag, position):
                position += len(tag)
            elif text[position].isspace() or text[position] in ";,":
                position += 1
            else:
                break
        return position


class Mistral:
    """Mistral: [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}], and since 2025
    [TOOL_CALLS]add[ARGS]{"a": 1}, once per call. An id that the model writes is the one its result refers to."""

    special_tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
    how = 'write [TOOL_CALLS] [{"name": "...", "arguments": {...}}]'
    _NAME = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\s*([^\s\[{]*)\s*)?(?:\[ARGS\])?")

    def read(self, turn: SampledTurn) -> ParsedTurn:
        return _read_blocks(turn, self.special_tokens[0], self._block)

    def _block(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        named = self._NAME.match(text, start)
        name = named[1] if named else ""
        try:
            value, end = scan_json(text, named.end() if named else start)
        except UnreadableError as error:
            following = text.find(self.special_tokens[0], start)
            return [_failed(name, str(error), self.how)], following if following >= 0 else len(text)
        if named is None:
            return explained(calls_of(value), self.how), end
        return explained([named_call(name, value, call_id=named[2] or "")], self.how), end


class Harmony:
    """GPT-OSS: <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>.

    A turn is a row of messages on channels. `content` is what is said on the channel `final`; in a turn without one, as
    when it ends with a call, what is said on the others (GPT-OSS's template puts it back on `analysis`)."""

    special_tokens = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|return|>", "<|call|>")
    how = "write to=functions.NAME<|channel|>commentary json<|message|>{...}<|call|>"
    _END = re.compile(r"<\|(?:end|return|call)\|>")
    _RECIPIENT = re.compile(r"\bto=([^\s<]+)")
    _CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")

    def read(self, turn: SampledTurn) -> ParsedTurn:
        text, body_mark = turn.marked_text, "<|message|>"
        if body_mark not in text:
            recipient = self._RECIPIENT.search(text) if "<|channel|>" in text else None
            calls = [_failed(_tool_name(recipient[1]), f"it has no {body_mark}", self.how)] if recipient else []
            return ParsedTurn(content=turn.text, calls=calls)
        said: dict[bool, list[str]] = {True: [], False: []}  # on the channel `final`, or on another
        calls = []
        position = 0
        while (body := text.find(body_mark, position)) >= 0:
            header = text[position:body]
            body += len(body_mark)
            end = self._END.search(text, body)
            content = text[body : end.start() if end else len(text)]
            recipient = self._RECIPIENT.search(header)
            if recipient is None:
                channel = self._CHANNEL.search(header)
                said[channel is not None and channel[1] == "final"].append(content)
            elif end is None:
                calls.append(_failed(_tool_name(recipient[1]), "it is not closed, <|call|> is missing", self.how))
            else:
                calls += explained([named_call(_tool_name(recipient[1]), content)], self.how)
            position = end.end() if end else len(text)
        return ParsedTurn(content=joined(said[True] or said[False]), calls=calls)


FORMATS: dict[str, type[Hermes] | type[Llama3Json] | type[Mistral] | type[Harmony]] = {
    "hermes": Hermes,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "harmony": Harmony,
}


AUTO = "auto"
_MARKS = {
    "<|call|>": "harmony",
    "[TOOL_CALLS]": "mistral",
    "<tool_call>": "hermes",
    "<|start_header_id|>ipython": "llama3_json",
    "<|python_tag|>": "llama3_json",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenParser:
    """`format` is None where `auto` recognized nothing; `reason` says why it is this one, or what to do."""

    name: str
    format: Format | None
    reason: str


def choose_parser(setting: str, *, template_source: str, vocabulary: Mapping[str, int]) -> ChosenParser:
    """The parser that `setting` names. `auto`: the format whose marks the chat template writes, else the one whose marks are
    tokens of the tokenizer.

    Raises:
        ConfigError: there is no such parser.
    """
    if ":" in setting:
        return ChosenParser(name=setting, format=UserParser(setting), reason="set in tool_calling.parser")
    if setting in FORMATS:
        return ChosenParser(name=setting, format=FORMATS[setting](), reason="set in tool_calling.parser")
    if setting != AUTO:
        names = [AUTO, *FORMATS]
        hint = did_you_mean(setting, names) or f"; it is one of {backticked(names)}"
        raise ConfigError(
            f"tool_calling.parser: there is no parser {setting!r}{hint}, or `module:attribute` of your own"
        )
    found = _recognize(template_source, vocabulary)
    if found is not None:
        name, reason = found
        return ChosenParser(name=name, format=FORMATS[name](), reason=reason)
    return ChosenParser(
        name=AUTO,
        format=None,
        reason=(
            "neither the chat template nor the vocabulary shows how the model writes tool calls; set tool_calling.parser to "
            f"{backticked(FORMATS)}, or to `module:attribute` of your own"
        ),
    )


def _recognize(template_source: str, vocabulary: Mapping[str, int]) -> tuple[str, str] | None:
    """The name of the format, and why it is that one."""
    if any(mark in template_source for mark in ("<function=", "<arg_key>")):
        return None  # Qwen3-Coder and GLM write no JSON inside <tool_call>
    for mark, name in _MARKS.items():
        if mark in template_source:
            return name, f"the chat template writes {mark}"
    return next(
        ((name, f"{mark} is a token of the tokenizer") for mark, name in _MARKS.items() if mark in vocabulary), None
    )


class UserParser:
    """Reads turns with the user's own parser (`tool_calling.parser`).

    Args:
        reference: `module:attribute`.

    Raises:
        ConfigError: there is no such object, it is async, or it cannot be called as `parse(text)`.
    """

    special_tokens: tuple[str, ...] = ()

    def __init__(self, reference: str) -> None:
        self._reference = reference
        self._parse = resolve_and_check(reference, "tool_calling.parser", given={"text": "text"})

    def read(self, turn: SampledTurn) -> ParsedTurn:
        """Raises whatever the user's function raises, and TypeError for what it may not return."""
        returned = self._parse(turn.text)
        content: Any = None
        calls: Any = returned
        if isinstance(returned, Mapping):
            content, calls = returned.get("content"), returned.get("tool_calls")
        if calls is None:
            calls = []
        if not isinstance(calls, list | tuple):
            raise TypeError(f"`{self._reference}` returned {json_kind(calls)} as tool calls; return a list")
        if content is not None and not isinstance(content, str):
            raise TypeError(f"`{self._reference}` returned {json_kind(content)} as content; return text")
        return ParsedTurn(
            content=turn.text if content is None else content,
            calls=explained(calls_of(read_json(json.dumps(calls))), "write it as the instructions say"),
        )


def _read_blocks(
    turn: SampledTurn, opening: str, read_block: Callable[[str, int], tuple[list[ToolCall], int]]
) -> ParsedTurn:
    """The calls of every block behind `opening`. `read_block` gets the text and where the inside of a block begins, and gives its
    calls and the position after it."""
    text = turn.marked_text
    found = text.find(opening, answer_start(text, is_open=turn.thinking_is_open))
    if found < 0:
        return ParsedTurn(content=turn.text)
    outside, calls = [text[:found]], []
    while found >= 0:
        block, position = read_block(text, found + len(opening))
        calls += block
        found = text.find(opening, position)
        outside.append(text[position : found if found >= 0 else len(text)])
    return ParsedTurn(content=joined(outside), calls=calls)


def joined(pieces: Sequence[str]) -> str:
    """The text around the calls: [" I look.\\n", "", "\\n"] -> "I look."."""
    return "\n".join(stripped for piece in pieces if (stripped := piece.strip()))


def explained(calls: Sequence[ToolCall], how: str) -> list[ToolCall]:
    """Each error with how a call is written, so that the policy can do better."""
    return [call if call.error is None else _failed(call.name, call.error, how, call.tool_call_id) for call in calls]


def _failed(name: str, problem: str, how: str, call_id: str = "") -> ToolCall:
    return ToolCall(name=name, error=f"this tool call cannot be read: {problem}; {how}", tool_call_id=call_id)


def _looks_like_calls(value: object) -> bool:
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(
        isinstance(item, dict)
        and (
            isinstance(item.get("function"), dict) or ("name" in item and ("parameters" in item or "arguments" in item))
        )
        for item in items
    )


def _tool_name(recipient: str) -> str:
    return recipient.removeprefix("functions.")
