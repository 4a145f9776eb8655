"""The formats in which models write tool calls, one class each; all others are vLLM's business (`VllmFormat`). They never raise,
whatever the policy wrote: a call that cannot be read becomes a `ToolCall` whose `error` says what was wrong and how to write it.
What vLLM reads as a call is the same call here, and what it does not read is none (docs/models.md has the differences).

A format declares the special tokens that it needs to see. What is inside thinking is not searched. The user's own parser
(`tool_calling.parser: module:attribute`) gets the text, on the event loop, and returns

    {"content": "I look.", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}

or the calls alone, also in the OpenAI form. What it raises is the turn's parse error: the whole text is then the message.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from grpo_async.chat.turn import (
    ParsedTurn,
    SampledTurn,
    call_of,
    calls_of,
    explained,
    failed_call,
    joined,
    named_call,
)
from grpo_async.errors import ConfigError, message_of
from grpo_async.records import ToolCall, answer_start
from grpo_async.user_code.references import resolve_and_check
from grpo_async.utils.strict_json import UnreadableError, read_json, scan_json
from grpo_async.utils.text import backticked, did_you_mean, json_kind

_NAME_IN_JSON = re.compile(r'"name"\s*:\s*"([^"\\]{1,128})"')  # of a call that cannot be read


class OwnFormat:
    """A format read by code of our own. `marks`: what stands before (with the tool's NAME), behind and between the arguments of
    calls; None where calls cannot be forced."""

    special_tokens: tuple[str, ...] = ()
    marks: tuple[str, str, str] | None = None

    def read(self, turn: SampledTurn) -> ParsedTurn:
        """The calls, and the text without them."""
        raise NotImplementedError

    def call_form(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        """The format of one or more calls, as xgrammar's structural tags have it; of a single tool one call."""
        if self.marks is None:
            return None
        begin, end, separator = self.marks
        tags = [
            {
                "type": "tag",
                "begin": begin.replace("NAME", tool["function"]["name"]),
                "content": {
                    "type": "json_schema",
                    "json_schema": tool["function"].get("parameters") or {"type": "object"},
                },
                "end": end,
            }
            for tool in tools
        ]
        how_many = {"at_least_one": True, "stop_after_first": len(tags) == 1}
        return {"type": "tags_with_separator", "tags": tags, "separator": separator, **how_many}


class Hermes(OwnFormat):
    """Hermes, Qwen2.5, Qwen3: <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>, any number of them. The last may be
    without its end."""

    special_tokens = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    how = 'write <tool_call>{"name": "...", "arguments": {...}}</tool_call>'
    marks = ('<tool_call>\n{"name": "NAME", "arguments": ', "}\n</tool_call>", "\n")

    def read(self, turn: SampledTurn) -> ParsedTurn:
        return _read_blocks(turn, self.special_tokens[0], self._block)

    def _block(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        opening, closing = self.special_tokens[:2]
        close = text.find(closing, start)
        inside, after = (close, close + len(closing)) if close >= 0 else (len(text), len(text))
        try:
            value, end = scan_json(text, start)
            if end > inside or text[end:inside].strip():
                raise UnreadableError(f"there is more text after the JSON, or {closing} inside of it")
        except UnreadableError as error:
            following = text.find(opening, start, inside)  # a call without its end does not swallow the next one
            after = following if following >= 0 else after
            named = _NAME_IN_JSON.search(text, start, after)
            return [failed_call(named[1] if named else "", str(error), self.how)], after
        return explained(self._calls(value), self.how), after

    def _calls(self, value: Any) -> list[ToolCall]:
        return [_exact_call(value, "arguments")]


class Cohere(Hermes):
    """Cohere: <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "add", "parameters": {"a": 1}}]<|END_ACTION|>."""

    special_tokens = ("<|START_ACTION|>", "<|END_ACTION|>", "<|START_THINKING|>", "<|END_THINKING|>")
    how = 'write <|START_ACTION|>[{"tool_name": "...", "parameters": {...}}]<|END_ACTION|>'
    marks = ('<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "NAME", "parameters": ', "}]<|END_ACTION|>", "")

    def _calls(self, value: Any) -> list[ToolCall]:
        return [
            _exact_call({"name": item.get("tool_name"), **item} if isinstance(item, dict) else item, "parameters")
            for item in (value if isinstance(value, list) else [value])
        ]


class Llama3Json(OwnFormat):
    """Llama 3: {"name": "add", "parameters": {"a": 1}}, any number of them, wherever they are in the turn. JSON that is not a call
    makes the whole turn an answer, unless <|python_tag|> says that it is meant as one."""

    special_tokens = ("<|python_tag|>",)
    how = 'write {"name": "...", "parameters": {...}} and nothing else'
    marks = ('{"name": "NAME", "parameters": ', "}", "; ")
    _BEGINS_LIKE_A_CALL = re.compile(r'\{\s*"(?:name"\s*:|type"\s*:\s*"function")')

    def read(self, turn: SampledTurn) -> ParsedTurn:
        text = turn.marked_text
        begin = position = answer_start(text, is_open=turn.thinking_is_open)
        tagged = text.find(self.special_tokens[0], begin) >= 0
        calls: list[ToolCall] = []
        while (start := text.find("{", position)) >= 0:
            try:
                value, position = scan_json(text, start)
            except UnreadableError as error:
                if not tagged and not self._BEGINS_LIKE_A_CALL.match(text, start):
                    return ParsedTurn(content=turn.text)
                named = _NAME_IN_JSON.search(text, start)
                calls.append(failed_call(named[1] if named else "", str(error), self.how))
                break
            call = _exact_call(value, "arguments", "parameters")
            is_meant = tagged or (call.name and value.keys() & {"arguments", "parameters"})
            if call.error is not None and not is_meant:
                return ParsedTurn(content=turn.text)
            calls += explained([call], self.how)
        if tagged and not calls:
            calls = [failed_call("", "there is no JSON", self.how)]
        return ParsedTurn(content=text[:begin].strip() if calls else turn.text, calls=calls)


class Mistral(OwnFormat):
    """Mistral: [TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}, "id": "abcdefghi"}], and since 2025
    [TOOL_CALLS]add[ARGS]{"a": 1}, once per call. An id that the model writes is the one its result refers to."""

    special_tokens = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]")
    how = 'write [TOOL_CALLS] [{"name": "...", "arguments": {...}}]'
    marks = ('[TOOL_CALLS] [{"name": "NAME", "arguments": ', "}]", "")
    _NAME = re.compile(r"\s*([^\s\[{]+)\s*(?:\[CALL_ID\]\s*([^\s\[{]*)\s*)?(?:\[ARGS\])?")

    def read(self, turn: SampledTurn) -> ParsedTurn:
        return _read_blocks(turn, self.special_tokens[0], self._block)

    def _block(self, text: str, start: int) -> tuple[list[ToolCall], int]:
        named = self._NAME.match(text, start)
        name = named[1] if named else ""
        if named and not text[named.end() :].strip():
            return [named_call(name, None, call_id=named[2] or "")], len(text)
        try:
            value, end = scan_json(text, named.end() if named else start)
        except UnreadableError as error:
            following = text.find(self.special_tokens[0], start)
            return [failed_call(name, str(error), self.how)], following if following >= 0 else len(text)
        if named is None:
            return explained(calls_of(value), self.how), end
        return explained([named_call(name, value, call_id=named[2] or "")], self.how), end


class Harmony(OwnFormat):
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
            calls = [failed_call(_tool_name(recipient[1]), f"it has no {body_mark}", self.how)] if recipient else []
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
                calls.append(failed_call(_tool_name(recipient[1]), "it is not closed, <|call|> is missing", self.how))
            else:
                calls += explained([named_call(_tool_name(recipient[1]), content)], self.how)
            position = end.end() if end else len(text)
        return ParsedTurn(content=joined(said[True] or said[False]), calls=calls)


def is_vllm_installed() -> bool:
    return find_spec("vllm") is not None


class VllmFormat:
    """Reads turns with the parser `name` of vLLM, which must be installed: that of `vllm serve --tool-call-parser NAME`, so a
    policy that vLLM serves later makes the calls that it was trained with. The import takes seconds."""

    def __init__(self, name: str, tokenizer: Any, special_tokens: Sequence[str]) -> None:
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.tool_parsers import ToolParserManager

        for noisy in ("vllm.tool_parsers", "vllm.parser"):  # a traceback for each call that cannot be read
            logging.getLogger(noisy).setLevel(logging.CRITICAL)
        self.special_tokens = special_tokens
        self._tokenizer = tokenizer
        self._request = ChatCompletionRequest
        try:
            self._parser = ToolParserManager.get_tool_parser(name)
            self._parser(tokenizer)
        except Exception as error:  # its constructors look for their tokens
            raise ConfigError(f"tool_calling.parser: vLLM's parser {name!r}: {message_of(error)}") from error

    def call_form(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
        from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag

        if (model := self._parser.structural_tag_model) is None:
            return None
        given = self._request(messages=[], tools=[dict(tool) for tool in tools], tool_choice="required").tools
        tag = get_model_structural_tag(model=model, tools=given, tool_choice="required", reasoning=False)
        form: dict[str, Any] = tag.format.model_dump()
        return form

    def read(self, turn: SampledTurn) -> ParsedTurn:
        text = turn.marked_text
        start = answer_start(text, is_open=turn.thinking_is_open)
        request = self._request(messages=[], tools=[dict(tool) for tool in turn.tools] or None)
        found = self._parser(self._tokenizer, request.tools).extract_tool_calls(text[start:], request)
        if not found.tools_called:
            return ParsedTurn(content=turn.text)
        calls = [
            # an id that is not the policy's own is random
            named_call(call.function.name, call.function.arguments, call_id=call.id if call.id in text else "")
            for call in found.tool_calls
        ]
        content = joined([text[:start], found.content or ""])
        return ParsedTurn(content=content, calls=explained(calls, "write it as the instructions say"))


FORMATS: dict[str, type[OwnFormat]] = {
    "hermes": Hermes,
    "cohere": Cohere,
    "llama3_json": Llama3Json,
    "mistral": Mistral,
    "harmony": Harmony,
}


AUTO = "auto"
_MARKS = {
    "<|call|>": "harmony",
    "[TOOL_CALLS]": "mistral",
    "<seed:tool_call>": "seed_oss",
    "<minimax:tool_call>": "minimax_m2",
    "<|tool_calls_section_begin|>": "kimi_k2",
    "<｜tool▁call▁begin｜>function": "deepseek_v3",
    "<｜tool▁call▁begin｜>": "deepseek_v31",
    "<|tool_call_start|>": "lfm2",
    "<|tool_call>": "gemma4",
    "<start_function_call>": "functiongemma",
    "<|START_ACTION|>": "cohere",
    "<|tools_prefix|>": "apertus",
    "<arg_key>": "glm47",
    "<function=": "qwen3_coder",
    "<function_calls>": "olmo3",
    "<tool_calls>": "jamba",
    "functools[": "phi4_mini_json",
    "<|tool_call|>": "granite",
    "<tool_call>": "hermes",
    "<|python_start|>": "llama4_pythonic",
    "<|start_header_id|>ipython": "llama3_json",
    "<|python_tag|>": "llama3_json",
}
"""What only the templates of a format write, the more particular first, and the parser, by the name it has in vLLM."""
VLLM_PARSERS = sorted({*_MARKS.values()} - FORMATS.keys())  # those that vLLM's own code reads


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenParser:
    """`format` is None where `auto` recognized nothing; `reason` says why it is this one, or what to do."""

    name: str
    format: OwnFormat | VllmFormat | None
    reason: str


def choose_parser(
    setting: str, *, template_source: str, tokenizer: Any, end_tokens: Sequence[str] = ()
) -> ChosenParser:
    """The parser that `setting` names. `auto`: the format whose marks the chat template writes, else the one whose marks are
    tokens of the tokenizer."""
    name, reason = setting, "set in tool_calling.parser"
    if ":" in setting:
        return ChosenParser(name=setting, format=UserParser(setting), reason=reason)
    if setting == AUTO:
        found = _recognize(template_source, tokenizer.get_added_vocab())
        if found is None:
            known = backticked([*FORMATS, *VLLM_PARSERS])
            reason = (
                "neither the chat template nor the vocabulary shows how the model writes tool calls; set tool_calling.parser "
                f"to {known}, another parser of vLLM, or `module:attribute` of your own"
            )
            return ChosenParser(name=AUTO, format=None, reason=reason)
        name, reason = found
    if name in FORMATS:
        return ChosenParser(name=name, format=FORMATS[name](), reason=reason)
    names = [AUTO, *FORMATS, *VLLM_PARSERS]
    if name not in VLLM_PARSERS and (not is_vllm_installed() or did_you_mean(name, names)):
        hint = did_you_mean(name, names) or f"; it is one of {backticked(names)}, another parser of vLLM (if installed)"
        raise ConfigError(f"tool_calling.parser: there is no parser {name!r}{hint}, or `module:attribute` of your own")
    if not is_vllm_installed():
        reason = (
            f"{reason}, which vLLM's parser `{name}` reads, and vLLM is not installed in the environment of the trainer; "
            "install it, or set tool_calling.parser to `module:attribute` of your own"
        )
        return ChosenParser(name=name, format=None, reason=reason)
    special_tokens = [token for token in tokenizer.get_added_vocab() if token not in end_tokens]
    return ChosenParser(name=name, format=VllmFormat(name, tokenizer, special_tokens), reason=reason)


def _recognize(template_source: str, vocabulary: Mapping[str, int]) -> tuple[str, str] | None:
    """The name of the format, and why it is that one."""
    for mark, name in _MARKS.items():
        if mark in template_source:
            return name, f"the chat template writes {mark}"
    return next(
        ((name, f"{mark} is a token of the tokenizer") for mark, name in _MARKS.items() if mark in vocabulary), None
    )


class UserParser(OwnFormat):
    """Reads turns with the user's own parser (`tool_calling.parser`); `read` raises what that raises."""

    def __init__(self, reference: str) -> None:
        self._reference = reference
        self._parse = resolve_and_check(reference, "tool_calling.parser", given={"text": "text"})

    def read(self, turn: SampledTurn) -> ParsedTurn:
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
    """The calls of every block behind `opening`; what follows the first is no content. `read_block` gives the calls of the
    block whose inside begins at a position, and the position after it."""
    text = turn.marked_text
    found = text.find(opening, answer_start(text, is_open=turn.thinking_is_open))
    if found < 0:
        return ParsedTurn(content=turn.text)
    content, calls = text[:found].strip(), []
    while found >= 0:
        block, position = read_block(text, found + len(opening))
        calls += block
        found = text.find(opening, position)
    return ParsedTurn(content=content, calls=calls)


def _exact_call(value: Any, *keys: str) -> ToolCall:
    """The call in a JSON value, as strictly as vLLM reads it: `name`, and an object of arguments under one of `keys`."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return call_of(value if not isinstance(value, dict) else {"name": value.get("name")})
    found = next((value[key] for key in keys if key in value), "")
    if isinstance(found, str):
        return ToolCall(name=value["name"], error=f"`{keys[-1]}` must be a JSON object")
    return named_call(value["name"], found)


def _tool_name(recipient: str) -> str:
    return recipient.removeprefix("functions.")
