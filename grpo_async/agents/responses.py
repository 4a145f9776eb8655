"""OpenAI's Responses.

POST /v1/responses
    input               text, or items: messages (text parts), function_call, function_call_output; reasoning items are dropped
    instructions        a system message of this request; previous_response_id continues without that of the earlier one
    previous_response_id    of an answer of the same rollout
    tools, tool_choice  functions; "auto" and "none"
    max_output_tokens, stream
    temperature, top_p, text.format      see session.py
    ignored             store, metadata, reasoning, include, ...
    refused             images, files, tools of OpenAI's servers, tool_choice required or named, background, conversation
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_async.agents.calls import Call, Exchange, Reply, event, number_of, refuse, sampling_of, text_of

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Responses(Exchange):
    """One request of Responses."""

    def __init__(self, body: Mapping[str, Any], model: str, kept: dict[Any, Any]) -> None:
        super().__init__(body, model, kept)
        for name in ("background", "conversation", "prompt"):
            if body.get(name):
                raise refuse(f"{name} is not supported", param=name)
        previous = body.get("previous_response_id")
        if previous is not None and not (isinstance(previous, str) and previous in kept):
            raise refuse(f"there is no response {previous!r} in this rollout", param="previous_response_id")
        self._messages: list[Mapping[str, Any]] = [] if previous is None else list(kept[previous])
        given = body.get("input")
        if isinstance(given, str):
            self._messages.append({"role": "user", "content": given})
        else:
            self._messages += _joined(self._read("input", _message))
        instructions = text_of(body.get("instructions"), "instructions")
        system = [{"role": "system", "content": instructions}] if instructions else []
        text = body.get("text")
        self._number = 0
        self._item = 0
        self._is_open = False
        self._created = int(time.time())
        self.call = Call(
            messages=[*system, *self._messages],
            tools=self._read("tools", _tool),
            tool_choice=body.get("tool_choice") or "auto",
            max_tokens=number_of(body, "max_output_tokens", kind=int),
            sampling=sampling_of(body),
            response_format=text.get("format") if isinstance(text, Mapping) else None,
        )

    def answer(self, replies: Sequence[Reply]) -> dict[str, Any]:
        reply = replies[0]
        self._kept[f"resp_{self.id}"] = [*self._messages, reply.message]
        output = []
        if reply.reasoning:
            output.append(self._reasoning(reply))
        if reply.content or not reply.tool_calls:
            output.append(self._message(reply.content))
        return self._response(output=[*output, *(self._call_item(call) for call in reply.tool_calls)], reply=reply)

    def begin(self) -> Iterator[bytes]:
        for name in ("response.created", "response.in_progress"):
            yield self._event(name, response=self._response(output=[], reply=None))

    def text(self, piece: str) -> Iterator[bytes]:
        if not self._is_open:
            self._is_open = True
            item = self._message("") | {"status": "in_progress", "content": []}
            yield self._event("response.output_item.added", output_index=self._item, item=item)
            yield self._text_event("response.content_part.added", part=_part(""))
        yield self._text_event("response.output_text.delta", delta=piece, logprobs=[])

    def end(self, reply: Reply, given: int) -> Iterator[bytes]:
        whole = self.answer([reply])
        for item in whole["output"]:
            if item["type"] == "message":
                if len(reply.content) > given or not self._is_open:
                    yield from self.text(reply.content[given:])
                yield self._text_event("response.output_text.done", text=reply.content, logprobs=[])
                yield self._text_event("response.content_part.done", part=_part(reply.content))
            else:
                started = item | {"status": "in_progress"} | ({"arguments": ""} if "arguments" in item else {})
                yield self._event("response.output_item.added", output_index=self._item, item=started)
            if item["type"] == "function_call":
                place = {"item_id": item["id"], "output_index": self._item}
                yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield self._event("response.function_call_arguments.done", **place, **done)
            yield self._event("response.output_item.done", output_index=self._item, item=item)
            self._item += 1
        yield self._event(f"response.{whole['status']}", response=whole)

    def _response(self, *, output: Sequence[Mapping[str, Any]], reply: Reply | None) -> dict[str, Any]:
        is_cut = reply is not None and reply.finish_reason == "length"
        body = self._body
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self._created,
            "status": "in_progress" if reply is None else "incomplete" if is_cut else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "instructions": body.get("instructions"),
            "max_output_tokens": body.get("max_output_tokens"),
            "metadata": body.get("metadata") or {},
            "model": self.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": body.get("previous_response_id"),
            "temperature": body.get("temperature"),
            "text": {"format": {"type": "text"}},
            "tool_choice": self.call.tool_choice,
            "tools": body.get("tools") or [],
            "top_p": body.get("top_p"),
            "truncation": "disabled",
            "usage": None if reply is None else _usage(reply),
        }

    def _message(self, text: str) -> dict[str, Any]:
        content = [_part(text)]
        return {
            "type": "message",
            "id": f"msg_{self.id}",
            "status": "completed",
            "role": "assistant",
            "content": content,
        }

    def _reasoning(self, reply: Reply) -> dict[str, Any]:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        return {"type": "reasoning", "id": f"rs_{self.id}", "summary": [], "content": content, "status": "completed"}

    def _call_item(self, call: Mapping[str, Any]) -> dict[str, Any]:
        function = call["function"]
        return {
            "type": "function_call",
            "id": f"fc_{call['id']}",
            "call_id": call["id"],
            "name": function["name"],
            "arguments": json.dumps(function["arguments"], ensure_ascii=False),
            "status": "completed",
        }

    def _event(self, name: str, /, **content: Any) -> bytes:
        self._number += 1
        return event({"type": name, "sequence_number": self._number - 1, **content}, name)

    def _text_event(self, name: str, /, **content: Any) -> bytes:
        return self._event(name, item_id=f"msg_{self.id}", output_index=self._item, content_index=0, **content)


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """An item as a message of Chat Completions; a call as one with nothing else in it. None for what is left out."""
    match item.get("type") or "message":
        case "reasoning":
            return None
        case "message":
            role = _ROLES.get(str(item.get("role")))
            if role is None:
                raise refuse(f"{where}.role is {item.get('role')!r}; there are {', '.join(_ROLES)}", param=where)
            return {"role": role, "content": text_of(item.get("content"), f"{where}.content")}
        case "function_call":
            function = {"name": str(item.get("name")), "arguments": item.get("arguments")}
            call = {"id": str(item.get("call_id")), "type": "function", "function": function}
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            text = text_of(item.get("output"), f"{where}.output")
            return {"role": "tool", "tool_call_id": str(item.get("call_id")), "content": text}
        case other:
            raise refuse(f"{where} is of type {other!r}, which is not supported", param=where)


def _joined(messages: Sequence[Mapping[str, Any] | None]) -> list[Mapping[str, Any]]:
    """With the text and the calls of one answer in one message."""
    joined: list[Mapping[str, Any]] = []
    for message in messages:
        if message is None:
            continue
        if "tool_calls" in message and joined and joined[-1]["role"] == "assistant":
            before = joined.pop()
            message = {**before, "tool_calls": [*before.get("tool_calls", ()), *message["tool_calls"]]}
        joined.append(message)
    return joined


def _tool(tool: Mapping[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
        raise refuse(f"{where} is not a function; tools of OpenAI's servers are not supported", param=where)
    function = {
        "name": tool["name"],
        "description": tool.get("description") or "",
        "parameters": tool.get("parameters"),
    }
    return {"type": "function", "function": function}


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(reply: Reply) -> dict[str, Any]:
    prompt, sampled = len(reply.prompt_ids), len(reply.ids)
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": prompt + sampled,
    }
