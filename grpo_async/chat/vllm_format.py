"""Tool calls read by vLLM's own parser, for formats that `formats` has no class for. It is the parser of `vllm serve
--tool-call-parser NAME`, so a policy that is served by vLLM later makes the calls that it was trained with.

Importing vLLM takes seconds, and happens here alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from grpo_async.chat.turn import ParsedTurn, SampledTurn, explained, joined, named_call
from grpo_async.errors import ConfigError, message_of
from grpo_async.records import answer_start


def is_vllm_installed() -> bool:
    return find_spec("vllm") is not None


class VllmFormat:
    """Reads turns with the parser `name` of vLLM, which must be installed."""

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
