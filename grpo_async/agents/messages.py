"""Anthropic's Messages.

POST /v1/messages
    system, messages    text, and blocks of type text, tool_use, tool_result; thinking blocks that come back are dropped
    tools, tool_choice  functions (name, description, input_schema); auto and none
    max_tokens, stop_sequences, stream
    thinking            enabled, adaptive: the policy's thinking is a block of its own; else it is left out
    temperature, top_p, top_k, output_config.format      see session.py
    ignored             metadata, cache_control, ...
    refused             images, documents, tools of Anthropic's servers, tool_choice any or tool

POST /v1/messages/count_tokens    tokens of the prompt that these messages would make
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from grpo_async.agents.calls import (
    AgentRefusal,
    Call,
    Exchange,
    Reply,
    event,
    number_of,
    refuse,
    sampling_of,
    stop_strings_of,
    text_of,
)

_KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
_FORCING = {"any": "required"}


class Messages(Exchange):
    """One request of Messages."""

    def __init__(self, body: Mapping[str, Any], model: str, kept: dict[Any, Any]) -> None:
        super().__init__(body, model, kept)
        thinking = body.get("thinking")
        self._shows_thinking = isinstance(thinking, Mapping) and thinking.get("type") in ("enabled", "adaptive")
        self._num_blocks = 0
        self._is_open = False
        system = text_of(body.get("system"), "system")
        messages = [{"role": "system", "content": system}] if system else []
        messages += chain.from_iterable(self._read("messages", _messages))
        choice = body.get("tool_choice") or {"type": "auto"}
        kind = choice.get("type") if isinstance(choice, Mapping) else choice
        output = body.get("output_config")
        self.call = Call(
            messages=messages,
            tools=self._read("tools", _tool),
            tool_choice=kind if kind in ("auto", "none") else _FORCING.get(str(kind), choice),
            stop=stop_strings_of(body.get("stop_sequences"), "stop_sequences"),
            max_tokens=number_of(body, "max_tokens", kind=int),
            sampling=sampling_of(body),
            response_format=body.get("output_format")
            or (output.get("format") if isinstance(output, Mapping) else None),
        )

    def answer(self, replies: Sequence[Reply]) -> dict[str, Any]:
        reply = replies[0]
        blocks: list[dict[str, Any]] = []
        if reply.reasoning and self._shows_thinking:
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.content or not reply.tool_calls:
            blocks.append({"type": "text", "text": reply.content})
        blocks += [{**_block(call), "input": call["function"]["arguments"]} for call in reply.tool_calls]
        return self._message(blocks, reply)

    def begin(self) -> Iterator[bytes]:
        yield self._event("message_start", message=self._message([], None))

    def text(self, piece: str) -> Iterator[bytes]:
        if not self._is_open:
            yield self._start({"type": "text", "text": ""})
            self._is_open = True
        yield self._delta(type="text_delta", text=piece)

    def end(self, reply: Reply, given: int) -> Iterator[bytes]:
        if reply.reasoning and self._shows_thinking:
            yield self._start({"type": "thinking", "thinking": "", "signature": ""})
            yield self._delta(type="thinking_delta", thinking=reply.reasoning)
            yield self._stop()
        if len(reply.content) > given:
            yield from self.text(reply.content[given:])
        if self._is_open:
            yield self._stop()
        for call in reply.tool_calls:
            yield self._start({**_block(call), "input": {}})
            yield self._delta(type="input_json_delta", partial_json=json.dumps(call["function"]["arguments"]))
            yield self._stop()
        ended = {"stop_reason": _stop_reason(reply), "stop_sequence": reply.stop_sequence}
        yield self._event("message_delta", delta=ended, usage=_usage(reply))
        yield self._event("message_stop")

    @staticmethod
    def error(refusal: AgentRefusal) -> dict[str, Any]:
        kind = _KINDS.get(refusal.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": str(refusal)}}

    def _message(self, blocks: Sequence[Mapping[str, Any]], reply: Reply | None) -> dict[str, Any]:
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
            "stop_reason": None if reply is None else _stop_reason(reply),
            "stop_sequence": None if reply is None else reply.stop_sequence,
            "usage": {"input_tokens": 0, "output_tokens": 0} if reply is None else _usage(reply),
        }

    def _event(self, name: str, /, **content: Any) -> bytes:
        return event({"type": name, **content}, name)

    def _start(self, block: Mapping[str, Any]) -> bytes:
        return self._event("content_block_start", index=self._num_blocks, content_block=block)

    def _delta(self, **delta: Any) -> bytes:
        return self._event("content_block_delta", index=self._num_blocks, delta=delta)

    def _stop(self) -> bytes:
        self._num_blocks += 1
        return self._event("content_block_stop", index=self._num_blocks - 1)


def _messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One message of Anthropic's as those of Chat Completions: results of tools are messages of their own."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant", "system"):
        raise refuse(f"{where}.role is {role!r}; there are user and assistant", param=f"{where}.role")
    if not isinstance(content, list):
        return [{"role": role, "content": text_of(content, f"{where}.content")}]
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    rest: list[Any] = []
    for number, block in enumerate(content):
        at = f"{where}.content[{number}]"
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            text = text_of(block.get("content"), f"{at}.content")
            results.append({"role": "tool", "tool_call_id": str(block.get("tool_use_id")), "content": text})
        elif kind == "tool_use":
            function = {"name": str(block.get("name")), "arguments": block.get("input") or {}}
            calls.append({"id": str(block.get("id")), "type": "function", "function": function})
        elif kind not in ("thinking", "redacted_thinking"):
            rest.append(block)
    read = list(results)
    if rest or calls or not results:
        own: dict[str, Any] = {"role": role, "content": text_of(rest, f"{where}.content")}
        read.append(own | {"tool_calls": calls} if calls else own)
    return read


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
        raise refuse(f"{where} is not a tool of your own; those of Anthropic's servers are not supported", param=where)
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("input_schema") or {"type": "object", "properties": {}},
    }
    return {"type": "function", "function": function}


def _block(call: Mapping[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"]}


def _stop_reason(reply: Reply) -> str:
    if reply.stop_sequence is not None:
        return "stop_sequence"
    return {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}[reply.finish_reason]


def _usage(reply: Reply) -> dict[str, int]:
    return {"input_tokens": len(reply.prompt_ids), "output_tokens": len(reply.ids)}
