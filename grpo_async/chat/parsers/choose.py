"""Which parser reads the policy's calls (`tool_calling.parser`).

A tokenizer may carry a description of its own format (`response_template`), which transformers reads.

A parser of the user's own: `module:attribute` of

    parse(text) -> {"content": "I look.", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}

It may also return the list of calls alone (the text then stays the content), calls in the OpenAI form ({"function": {...}}),
and None or an empty list for no calls. If its signature names them, it is given `raw_text` (with special tokens) and `token_ids`.
It runs on the event loop, so it should be quick. What it raises is the turn's parse error: the text stands as the message. Its
calls are held to the same rules as those of the built-in formats (see json_calls): one that breaks them has an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from grpo_async.chat.parsers.formats import FORMATS, Format, explained
from grpo_async.chat.parsers.json_calls import calls_of, checked_call_of
from grpo_async.chat.turn import ParsedTurn, ReadCall, SampledTurn
from grpo_async.errors import ConfigError
from grpo_async.user_code.calls import is_async
from grpo_async.user_code.references import resolve_function
from grpo_async.utils.text import backticked, did_you_mean, json_kind

AUTO = "auto"
RESPONSE_TEMPLATE = "response_template"
_SIGNS = {
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


def choose_parser(
    setting: str, tokenizer: Any, *, template_source: str, vocabulary: Mapping[str, int], generation_prompt: str
) -> ChosenParser:
    """The parser that `setting` names. `auto`: the format whose tokens the chat template writes, then the one whose tokens are
    tokens, then the tokenizer's own `response_template`; that comes last because it cannot say which call is wrong, and why.

    Raises:
        ConfigError: there is no such parser.
    """
    if ":" in setting:
        decode = _decoder(tokenizer)
        return ChosenParser(name=setting, format=UserParser(setting, decode), reason="set in tool_calling.parser")
    if setting in FORMATS:
        return ChosenParser(name=setting, format=FORMATS[setting](), reason="set in tool_calling.parser")
    has_own = getattr(tokenizer, "response_template", None) is not None
    if setting == RESPONSE_TEMPLATE and not has_own:
        raise ConfigError("tool_calling.parser: the tokenizer has no `response_template`; set another parser")
    if setting not in (AUTO, RESPONSE_TEMPLATE):
        names = [AUTO, *FORMATS, RESPONSE_TEMPLATE]
        hint = did_you_mean(setting, names) or f"; it is one of {backticked(names)}"
        raise ConfigError(
            f"tool_calling.parser: there is no parser {setting!r}{hint}, or `module:attribute` of your own"
        )
    found = _recognize(template_source, vocabulary) if setting == AUTO else None
    if found is not None:
        name, reason = found
        return ChosenParser(name=name, format=FORMATS[name](), reason=reason)
    if has_own:
        reader = ResponseTemplate(tokenizer, generation_prompt)
        return ChosenParser(name=RESPONSE_TEMPLATE, format=reader, reason="the tokenizer describes its own format")
    return ChosenParser(
        name=AUTO,
        format=None,
        reason=(
            "neither the chat template nor the vocabulary shows how the model writes tool calls; set tool_calling.parser to "
            f"{backticked(FORMATS)}, or to `module:attribute` of your own"
        ),
    )


def _recognize(template_source: str, vocabulary: Mapping[str, int]) -> tuple[str, str] | None:
    """The name of the format, and the sign of it."""

    if any(mark in template_source for mark in ("<function=", "<arg_key>")):
        return None  # Qwen3-Coder and GLM write no JSON inside <tool_call>
    for mark, name in _SIGNS.items():
        if mark in template_source:
            return name, f"the chat template writes {mark}"
    return next(
        ((name, f"{mark} is a token of the tokenizer") for mark, name in _SIGNS.items() if mark in vocabulary), None
    )


def _decoder(tokenizer: Any) -> Any:
    def decode(token_ids: list[int]) -> str:
        return str(tokenizer.decode(token_ids, skip_special_tokens=False))

    return decode


class ResponseTemplate:
    """Reads turns with `tokenizer.parse_response`. One call that cannot be read makes it refuse the whole turn; the policy
    then gets one error for all its calls.

    Args:
        tokenizer: has a `response_template`.
        generation_prompt: text before the policy's turn.
    """

    special_tokens: tuple[str, ...] = ()

    def __init__(self, tokenizer: Any, generation_prompt: str) -> None:
        self._tokenizer = tokenizer
        self._generation_prompt = generation_prompt

    def read(self, turn: SampledTurn) -> ParsedTurn:
        try:
            message = self._tokenizer.parse_response(list(turn.token_ids), prefix=self._generation_prompt)
        except ValueError as error:
            problem = f"this tool call cannot be read: {str(error).splitlines()[0]}."
            return ParsedTurn(content=turn.text, calls=[ReadCall(error=problem)])
        calls = calls_of(list(message.get("tool_calls") or []))
        if not calls:
            return ParsedTurn(content=turn.text)
        said = message.get("content")
        content = said if isinstance(said, str) else ""
        thinking = next(
            (message[key] for key in ("reasoning_content", "thinking", "reasoning") if message.get(key)), None
        )
        if isinstance(thinking, str):
            content = f"<think>\n{thinking}\n</think>\n\n{content}".rstrip()
        return ParsedTurn(content=content, calls=explained(calls, "write it as the instructions say"))


_OFFERED = ("raw_text", "token_ids")


class UserParser:
    """
    Args:
        reference: `module:attribute`.
        decode: text of token ids, special tokens included.

    Raises:
        ConfigError: there is no such object, or it cannot be called as `parse(text)`.
    """

    special_tokens: tuple[str, ...] = ()

    def __init__(self, reference: str, decode: Callable[[list[int]], str]) -> None:
        self._reference = reference
        self._decode = decode
        self._parse = resolve_function(reference, f"tool_calling.parser: {reference}")
        if is_async(self._parse):
            raise ConfigError(f"tool_calling.parser: `{reference}` is async; a parser is a plain function")
        self._keywords = self._wanted_keywords()

    def read(self, turn: SampledTurn) -> ParsedTurn:
        """Raises whatever the user's function raises, and TypeError for what it may not return."""
        ids = list(turn.token_ids)
        offered: dict[str, Any] = {"raw_text": self._decode(ids), "token_ids": ids} if self._keywords else {}
        returned = self._parse(turn.text, **{name: offered[name] for name in self._keywords})
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
            calls=explained([checked_call_of(call) for call in calls], "write it as the instructions say"),
        )

    def _wanted_keywords(self) -> list[str]:
        try:
            parameters = inspect.signature(self._parse).parameters
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
            wanted = [name for name in _OFFERED if takes_any or name in parameters]
            inspect.signature(self._parse).bind("text", **dict.fromkeys(wanted))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"tool_calling.parser: `{self._reference}` cannot be called as parse(text): {error}; it may also take "
                "`raw_text` and `token_ids`"
            ) from error
        return wanted
