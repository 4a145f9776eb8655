"""A parser of the user's own: `module:attribute` of

    parse(text) -> {"content": "I look.", "tool_calls": [{"name": "add", "arguments": {"a": 1}}]}

It may also return the list of calls alone (the text then stays the content), calls in the OpenAI form ({"function": {...}}),
and None or an empty list for no calls. If its signature names them, it is given `raw_text` (with special tokens) and `token_ids`.
It runs on the event loop, so it should be quick. What it raises is the turn's parse error: the text stands as the message. Its
calls are held to the same rules as those of the built-in formats (see json_calls): one that breaks them has an error.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from grpo_async.chat.parsers.formats import explained
from grpo_async.chat.parsers.json_calls import checked_call_of, kind_of
from grpo_async.chat.turn import Reading, SampledTurn
from grpo_async.errors import ConfigError
from grpo_async.user_code.references import resolve

_OFFERED = ("raw_text", "token_ids")


class UserParser:
    """
    Args:
        reference: `module:attribute`.
        decode: text of token ids, special tokens included.

    Raises:
        ConfigError: there is no such object, or it cannot be called as `parse(text)`.
    """

    marks: tuple[str, ...] = ()

    def __init__(self, reference: str, decode: Callable[[list[int]], str]) -> None:
        self._reference = reference
        self._decode = decode
        try:
            self._parse = resolve(reference)
        except ConfigError as error:
            raise ConfigError(f"tool_calling.parser: {error}") from error
        if not callable(self._parse):
            raise ConfigError(f"tool_calling.parser: `{reference}` is {type(self._parse).__name__}, not a function")
        call = getattr(type(self._parse), "__call__", None)  # noqa: B004 - a look at its kind
        if inspect.iscoroutinefunction(self._parse) or inspect.iscoroutinefunction(call):
            raise ConfigError(f"tool_calling.parser: `{reference}` is async; a parser is a plain function")
        self._keywords = self._wanted_keywords()

    def read(self, turn: SampledTurn) -> Reading:
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
            raise TypeError(f"`{self._reference}` returned {kind_of(calls)} as tool calls; return a list")
        if content is not None and not isinstance(content, str):
            raise TypeError(f"`{self._reference}` returned {kind_of(content)} as content; return text")
        return Reading(
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
