"""The APIs of the endpoint: they convert a request's JSON to `Call`, an `Answer` to JSON, and that to events.

                     OpenAI Chat Completions   OpenAI Responses         Anthropic Messages
    path             /v1/chat/completions      /v1/responses            /v1/messages
    history          messages                  input, instructions      system, messages
    limit            max_(completion_)tokens   max_output_tokens        max_tokens
    thinking         reasoning_content         an item `reasoning`      a block, where `thinking` is enabled or adaptive
    continued by     the whole history         previous_response_id     the whole history

All of them accept text only, functions as tools, `tool_choice`, `stop`, `stream`, sampling settings and a response
format (session.py says how these are applied). Unsupported settings that only change sampling or the prompt
(`_NEUTRAL`) are ignored, with one warning. Whatever else is not known to leave the answer as it is (`_HARMLESS`) is
refused by its name, such as images, tools that run at the provider, conversations that the provider keeps, `n` > 1. A
stream sends the complete answer as events: an agent acts on complete answers.
"""

from __future__ import annotations

import json
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from grpo_async.agents.calls import ApiError, Call, bad_request
from grpo_async.agents.history import Answer
from grpo_async.config.sections import SAMPLING
from grpo_async.inference.sampling import listed_stop
from grpo_async.utils.strict_json import arguments_text
from grpo_async.utils.text import text_of_parts
from grpo_async.utils.validation import problems_of

Made = TypeVar("Made")
Event = tuple[str | None, Mapping[str, Any]]
"""Name and content of a server-sent event."""

_NEUTRAL: Mapping[str, Any] = {
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "logit_bias": {},
    "bad_words": [],
    "min_tokens": 0,
    "ignore_eos": False,
    "stop_token_ids": [],
    "chat_template_kwargs": {},
    "thinking_token_budget": None,
    "reasoning_effort": None,
    "reasoning.effort": None,  # of Responses
    "output_config.effort": None,  # of Messages
    "verbosity": "medium",
    "text.verbosity": "medium",
    "truncation": "disabled",
    "modalities": ["text"],
    "parallel_tool_calls": True,
    "tool_choice.disable_parallel_tool_use": False,  # of Messages
}
"""Unsupported settings that change what is sampled, with the values that change nothing; null changes
nothing either."""
_HARMLESS = frozenset(
    ("model", "messages", "tools", "metadata", "user", "store", "service_tier", "safety_identifier", "prediction",
     "prompt_cache_key", "prompt_cache_retention", "cache_control", "inference_geo", "speed", "diagnostics", "billing_policy",
     "max_tool_calls")
)  # fmt: skip
"""Fields that need no reading: they change neither what is sampled nor the form of the answer."""
_ANTHROPIC_KINDS = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"
}  # fmt: skip


def _value_at(body: Any, path: str) -> Any:
    """The value at a dotted path; None where there is none."""
    for name in path.split("."):
        body = body.get(name) if isinstance(body, Mapping) else None
    return body


StopStrings = Annotated[list[str], BeforeValidator(listed_stop)]
Limit = Annotated[int, Field(ge=1)]


class _Body(BaseModel):
    """The request fields that are read by name, for all APIs."""

    stream: bool | None = None
    stop: StopStrings = []
    stop_sequences: StopStrings = []
    max_completion_tokens: Limit | None = None
    max_tokens: Limit | None = None
    max_output_tokens: Limit | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    tool_choice: str | Mapping[str, Any] | None = None
    stream_options: Mapping[str, Any] | None = None
    thinking: Mapping[str, Any] | None = None
    response_format: Any = None
    text: Mapping[str, Any] | None = None
    output_config: Mapping[str, Any] | None = None


class Exchange(ABC):
    """One request of an API and its answer."""

    def __init__(self, body: Mapping[str, Any], model: str, api_state: dict[Any, Any]) -> None:
        self.id = secrets.token_hex(12)
        self.model = model
        self._json = body
        self._api_state = api_state
        self._created = int(time.time())
        known = _HARMLESS | _Body.model_fields.keys() | {path.split(".")[0] for path in _NEUTRAL} | self.own_fields
        for name, value in body.items():
            if value and name not in known:
                raise bad_request(f"{name} is not supported", param=name)
        try:
            self._body = fields = _Body.model_validate(body)
        except ValidationError as error:
            raise bad_request(problems_of(error), param=str(error.errors()[0]["loc"][0])) from error
        limits = (fields.max_completion_tokens, fields.max_tokens, fields.max_output_tokens)
        sampling = {name: value for name in SAMPLING if (value := getattr(fields, name)) is not None}
        if sampling.get("top_k") == -1:  # -1 means all, like 0
            sampling["top_k"] = 0
        nested = (fields.text or fields.output_config or {}).get("format")
        self.is_stream = bool(fields.stream)
        messages = self._messages()
        _check_results(messages)
        tools = self._read("tools", self._tool)
        choice, forced_tools = _tool_choice(fields.tool_choice or "auto", tools)
        self.call = Call(
            messages=messages,
            tools=tools,
            tool_choice="required" if forced_tools else choice,
            forced_tools=forced_tools,
            stop=[each for each in dict.fromkeys([*fields.stop, *fields.stop_sequences]) if each],
            max_tokens=next((limit for limit in limits if limit is not None), None),
            sampling=sampling,
            seed=fields.seed,
            response_format=fields.response_format or nested,
            ignored=[path for path, neutral in _NEUTRAL.items() if _value_at(body, path) not in (None, neutral)],
        )

    def _read(self, name: str, read: Callable[[Mapping[str, Any], str], Made]) -> list[Made]:
        """Apply `read` to each object of a list, with its name for errors; empty if the field is not set."""
        found = self._json.get(name) or []
        if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found):
            raise bad_request(f"{name} is not a list of objects", param=name)
        return [read(item, f"{name}[{place}]") for place, item in enumerate(found)]

    @abstractmethod
    def _messages(self) -> list[Mapping[str, Any]]:
        """The history, in the form of Chat Completions."""

    @staticmethod
    @abstractmethod
    def _tool(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        """A tool in the form of Chat Completions."""

    @abstractmethod
    def answer(self, reply: Answer) -> dict[str, Any]:
        """The JSON of the answer."""

    @abstractmethod
    def events(self, answer: Mapping[str, Any]) -> Iterator[Event]:
        """The answer as a stream."""

    def stream(self, answer: Mapping[str, Any]) -> bytes:
        """The bytes of `events`."""
        pieces = []
        for name, content in self.events(answer):
            head = f"event: {name}\n" if name else ""
            pieces.append(f"{head}data: {json.dumps(content, separators=(',', ':'))}\n\n")
        return "".join([*pieces, self.stream_end]).encode()

    own_fields: ClassVar[frozenset[str]] = frozenset()
    """Further fields that the API's class reads."""
    stream_end: ClassVar[str] = ""

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        """The JSON of an error, in OpenAI's format unless an API has its own."""
        content = {"message": str(error), "type": error.kind, "param": error.param, "code": error.code}
        return {"error": content}


class ChatCompletion(Exchange):
    """OpenAI's Chat Completions."""

    stream_end = "data: [DONE]\n\n"

    def _messages(self) -> list[Mapping[str, Any]]:
        return self._read("messages", _chat_message)

    @staticmethod
    def _tool(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        function = tool.get("function")
        if (
            tool.get("type") != "function"
            or not isinstance(function, Mapping)
            or not isinstance(function.get("name"), str)
        ):
            raise bad_request(
                f"{where} is not a function with a name; other kinds of tools are not supported", param=where
            )
        return tool

    def answer(self, reply: Answer) -> dict[str, Any]:
        message: dict[str, Any] = {
            "role": "assistant",
            "content": reply.content if reply.content or not reply.tool_calls else None,
            "refusal": None,
        }
        if reply.reasoning:
            message["reasoning_content"] = reply.reasoning
        if reply.tool_calls:
            message["tool_calls"] = [
                {**call, "function": {**call["function"], "arguments": arguments_text(call)}}
                for call in reply.tool_calls
            ]
        choice = {
            "index": 0,
            "message": message,
            "logprobs": None,
            "finish_reason": reply.finish_reason,
            "stop_reason": reply.generation.stop_reason,
        }
        return {
            "id": f"chatcmpl-{self.id}",
            "object": "chat.completion",
            "created": self._created,
            "model": self.model,
            "choices": [choice],
            "usage": _usage(reply, "prompt_tokens", "completion_tokens"),
        }

    def events(self, answer: Mapping[str, Any]) -> Iterator[Event]:
        [choice] = answer["choices"]
        message = choice["message"]
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{name: message[name]} for name in ("reasoning_content", "content") if message.get(name)]
        if calls := message.get("tool_calls"):
            deltas.append({"tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]})
        last = {name: value for name, value in choice.items() if name != "message"} | {"delta": {}}
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas]
        head = {"id": answer["id"], "object": "chat.completion.chunk", "created": self._created, "model": self.model}
        for each in (*choices, last):
            yield None, head | {"choices": [each]}
        if (self._body.stream_options or {}).get("include_usage"):
            yield None, head | {"choices": [], "usage": answer["usage"]}


class Responses(Exchange):
    """OpenAI's Responses. Reasoning items that come back are dropped. Instructions apply to their own request: a follow-up
    does not inherit those of the response that it continues."""

    own_fields = frozenset(("input", "instructions", "previous_response_id", "include"))

    def _messages(self) -> list[Mapping[str, Any]]:
        if "message.output_text.logprobs" in (self._json.get("include") or ()):
            raise bad_request("include: message.output_text.logprobs is not supported", param="include")
        previous = self._json.get("previous_response_id")
        if previous is not None and not (isinstance(previous, str) and previous in self._api_state):
            raise bad_request(f"there is no response {previous!r} in this rollout", param="previous_response_id")
        history: list[Mapping[str, Any]] = [] if previous is None else list(self._api_state[previous])
        given = self._json.get("input")
        if isinstance(given, str):
            history.append({"role": "user", "content": given})
        else:
            history += _joined(self._read("input", _response_message))
        self._history = history
        instructions = _text(self._json.get("instructions"), "instructions")
        return [*([{"role": "system", "content": instructions}] if instructions else []), *history]

    @staticmethod
    def _tool(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        if tool.get("type") != "function" or not isinstance(tool.get("name"), str):
            raise bad_request(f"{where} is not a function; tools of OpenAI's servers are not supported", param=where)
        return _function_tool(tool, tool.get("parameters"))

    def answer(self, reply: Answer) -> dict[str, Any]:
        self._api_state[f"resp_{self.id}"] = [*self._history, reply.message]
        output: list[dict[str, Any]] = []
        if reply.reasoning:
            content = [{"type": "reasoning_text", "text": reply.reasoning}]
            output.append({"type": "reasoning", "id": f"rs_{self.id}", "summary": [], "content": content})
        if reply.content or not reply.tool_calls:
            part = {"type": "output_text", "text": reply.content, "annotations": [], "logprobs": []}
            output.append({"type": "message", "id": f"msg_{self.id}", "role": "assistant", "content": [part]})
        for call in reply.tool_calls:
            name = call["function"]["name"]
            head = {"type": "function_call", "id": f"fc_{call['id']}", "call_id": call["id"]}
            output.append({**head, "name": name, "arguments": arguments_text(call)})
        usage = _usage(reply, "input_tokens", "output_tokens")
        usage |= {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        is_truncated = reply.finish_reason == "length"
        echoed = ("instructions", "max_output_tokens", "previous_response_id", "temperature", "top_p")
        return {
            "id": f"resp_{self.id}",
            "object": "response",
            "created_at": self._created,
            "status": "incomplete" if is_truncated else "completed",
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if is_truncated else None,
            "metadata": self._json.get("metadata") or {},
            "model": self.model,
            "output": [{**item, "status": "completed"} for item in output],
            "parallel_tool_calls": True,
            "text": self._json.get("text") or {"format": {"type": "text"}},
            "tool_choice": self._json.get("tool_choice") or "auto",
            "tools": self._json.get("tools") or [],
            "truncation": "disabled",
            "usage": usage,
            **{name: self._json.get(name) for name in echoed},
        }

    def events(self, answer: Mapping[str, Any]) -> Iterator[Event]:
        for number, (name, content) in enumerate(self._unnumbered_events(answer)):
            yield name, {"type": name, "sequence_number": number, **content}

    def _unnumbered_events(self, answer: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        begun = {**answer, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        yield "response.created", {"response": begun}
        yield "response.in_progress", {"response": begun}
        for index, item in enumerate(answer["output"]):
            at = {"item_id": item["id"], "output_index": index}
            empty: dict[str, Any] = {}
            if item["type"] != "reasoning":
                empty = {"content": []} if item["type"] == "message" else {"arguments": ""}
            yield (
                "response.output_item.added",
                {"output_index": index, "item": {**item, **empty, "status": "in_progress"}},
            )
            if item["type"] == "message":
                [part] = item["content"]
                at |= {"content_index": 0}
                yield "response.content_part.added", {**at, "part": {**part, "text": ""}}
                yield "response.output_text.delta", {**at, "delta": part["text"], "logprobs": []}
                yield "response.output_text.done", {**at, "text": part["text"], "logprobs": []}
                yield "response.content_part.done", {**at, "part": part}
            elif item["type"] == "function_call":
                done = {"arguments": item["arguments"], "name": item["name"]}
                yield "response.function_call_arguments.delta", {**at, "delta": item["arguments"]}
                yield "response.function_call_arguments.done", {**at, **done}
            yield "response.output_item.done", {"output_index": index, "item": item}
        yield f"response.{answer['status']}", {"response": answer}


class Messages(Exchange):
    """Anthropic's Messages. Thinking blocks that come back are dropped."""

    own_fields = frozenset(("system", "thread"))

    def _messages(self) -> list[Mapping[str, Any]]:
        if self._json.get("thread"):  # the SDK's tool runner then sends the whole history
            raise bad_request(
                "thread is not supported: send the whole history", param="thread", code="thread_unsupported_request"
            )
        system = _text(self._json.get("system"), "system")
        head: list[Mapping[str, Any]] = [{"role": "system", "content": system}] if system else []
        return [*head, *chain.from_iterable(self._read("messages", _anthropic_messages))]

    @staticmethod
    def _tool(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
        if tool.get("type") not in (None, "custom") or not isinstance(tool.get("name"), str):
            raise bad_request(
                f"{where} is not a client-side tool; Anthropic's server tools are not supported", param=where
            )
        return _function_tool(tool, tool.get("input_schema") or {"type": "object", "properties": {}})

    def answer(self, reply: Answer) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        if reply.reasoning and (self._body.thinking or {}).get("type") in ("enabled", "adaptive"):
            blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
        if reply.content or not reply.tool_calls:
            blocks.append({"type": "text", "text": reply.content})
        for call in reply.tool_calls:
            function = call["function"]
            block = {"type": "tool_use", "id": call["id"], "name": function["name"], "input": function["arguments"]}
            blocks.append(block)
        reasons = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
        # a stop string that ends a tool call is not the reason that counts: the client has to run the tool
        stop_string = None if reply.tool_calls else reply.generation.stop_reason
        return {
            "id": f"msg_{self.id}",
            "type": "message",
            "role": "assistant",
            "model": self.model,
            "content": blocks,
            "stop_reason": reasons[reply.finish_reason] if stop_string is None else "stop_sequence",
            "stop_sequence": stop_string,
            "usage": {"input_tokens": reply.request.num_tokens, "output_tokens": len(reply.ids)},
        }

    def events(self, answer: Mapping[str, Any]) -> Iterator[Event]:
        for name, content in self._typeless_events(answer):
            yield name, {"type": name, **content}

    @staticmethod
    def _typeless_events(answer: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        begun = {**answer, "content": [], "stop_reason": None, "stop_sequence": None}
        yield "message_start", {"message": begun}
        for index, block in enumerate(answer["content"]):
            match block["type"]:
                case "tool_use":
                    empty: Mapping[str, Any] = {"input": {}}
                    delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
                case kind:
                    empty = {kind: ""}
                    delta = {"type": f"{kind}_delta", kind: block[kind]}
            yield "content_block_start", {"index": index, "content_block": {**block, **empty}}
            yield "content_block_delta", {"index": index, "delta": delta}
            yield "content_block_stop", {"index": index}
        ended = {name: answer[name] for name in ("stop_reason", "stop_sequence")}
        yield "message_delta", {"delta": ended, "usage": answer["usage"]}
        yield "message_stop", {}

    @staticmethod
    def error(error: ApiError) -> dict[str, Any]:
        content: dict[str, Any] = {"type": _ANTHROPIC_KINDS.get(error.status, "api_error"), "message": str(error)}
        if error.code is not None:
            content["details"] = {"error_code": error.code}
        return {"type": "error", "error": content}


# -- items of a history, in the form of Chat Completions


def _tool_choice(
    choice: str | Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[Literal["auto", "none"], list[Mapping[str, Any]]]:
    """The choice where nothing is forced, and otherwise the tools of which one has to be called, from any API's form:
    "required", {"type": "any"}, {"type": "function", "function": {"name": N}}, {"type": "tool", "name": N}."""
    fields = choice if isinstance(choice, Mapping) else {"type": choice}
    match fields.get("type"):
        case "auto" | "none" as kind:
            return kind, []
        case "required" | "any":
            forced = list(tools)
        case "function" | "tool":
            named = fields.get("function", fields)
            name = named.get("name") if isinstance(named, Mapping) else None
            forced = [tool for tool in tools if tool["function"]["name"] == name]
        case other:
            raise bad_request(f"tool_choice {other!r} is not supported", param="tool_choice")
    if not forced:
        raise bad_request("tool_choice forces a call of a tool that is not among the tools", param="tool_choice")
    return "auto", forced


def _check_results(messages: Sequence[Mapping[str, Any]]) -> None:
    """Refuse what the APIs refuse: calls without exactly one result right after their answer, results of no call, and a last
    message of the assistant (a prefill, which would otherwise be closed and answered by a second turn)."""
    missing: list[str] = []
    for place, message in enumerate(messages):
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            if call_id not in missing:
                raise bad_request(
                    f"message {place} is the result of {call_id!r}, which is no call of the answer before it, or has a result",
                    param="messages",
                )
            missing.remove(call_id)
            continue
        if missing:
            break
        missing = [str(call.get("id")) for call in message.get("tool_calls") or ()]
    if missing:
        raise bad_request(f"there is no result right after the tool calls {', '.join(missing)}", param="messages")
    if messages and messages[-1]["role"] == "assistant":
        raise bad_request(
            "the last message is the assistant's: continuing it (prefill) is not supported; end with a user's message or a "
            "tool's result",
            param="messages",
        )


def _chat_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    read = _plain_message(message, where, ("system", "developer", "user", "assistant", "tool"))
    if read["role"] == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise bad_request(f"{where} has no tool_call_id", param=f"{where}.tool_call_id")
        read["tool_call_id"] = message["tool_call_id"]
    if read["role"] == "assistant" and (calls := message.get("tool_calls")):
        for each in calls if isinstance(calls, list) else [None]:
            call = each if isinstance(each, Mapping) else {}
            function = call.get("function")
            if (
                not isinstance(function, Mapping)
                or not isinstance(function.get("name"), str)
                or not isinstance(call.get("id"), str | int | None)
            ):
                raise bad_request(
                    f"{where}.tool_calls is not a list of calls, each with the name of a function and an id that is text (or none)",
                    param=f"{where}.tool_calls",
                )
        read["tool_calls"] = calls
    if isinstance(message.get("name"), str):
        read["name"] = message["name"]
    return read


def _response_message(item: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """An item of Responses as a message; a call becomes a message with nothing else in it. None for items that are ignored."""
    match item.get("type") or "message":
        case "reasoning":
            return None
        case "message":
            return _plain_message(item, where, ("system", "developer", "user", "assistant"))
        case "function_call":
            call = _call(item.get("call_id"), item.get("name"), item.get("arguments"))
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        case "function_call_output":
            return _result(item.get("call_id"), _text(item.get("output"), f"{where}.output"))
        case other:
            raise bad_request(f"{where} is of type {other!r}, which is not supported", param=where)


def _joined(messages: Sequence[Mapping[str, Any] | None]) -> list[Mapping[str, Any]]:
    """Merge the text and the calls of one answer into one message."""
    joined: list[Mapping[str, Any]] = []
    for message in messages:
        if message is None:
            continue
        if "tool_calls" in message and joined and joined[-1]["role"] == "assistant":
            before = joined.pop()
            message = {**before, "tool_calls": [*before.get("tool_calls", ()), *message["tool_calls"]]}
        joined.append(message)
    return joined


def _anthropic_messages(message: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """The messages of one Anthropic message: tool results in it become separate messages, and come first."""
    content = message.get("content")
    if not isinstance(content, list):
        return [_plain_message(message, where, ("user", "assistant", "system"))]
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    rest: list[Any] = []
    for number, block in enumerate(content):
        kind = block.get("type") if isinstance(block, Mapping) else None
        if kind == "tool_result":
            if rest:
                raise bad_request(f"{where}.content: results of tools come before other blocks", param=where)
            text = _text(block.get("content"), f"{where}.content[{number}].content")
            results.append(_result(block.get("tool_use_id"), text))
        elif kind == "tool_use":
            calls.append(_call(block.get("id"), block.get("name"), block.get("input") or {}))
        elif kind not in ("thinking", "redacted_thinking"):
            rest.append(block)
    own = _plain_message({**message, "content": rest}, where, ("user", "assistant", "system"))
    if calls:
        own["tool_calls"] = calls
    return [*results, own] if rest or calls or not results else results


def _plain_message(message: Mapping[str, Any], where: str, roles: Sequence[str]) -> dict[str, Any]:
    role = message.get("role")
    if role not in roles:
        raise bad_request(f"{where}.role is {role!r}; there are {', '.join(roles)}", param=f"{where}.role")
    content = _text(message.get("content"), f"{where}.content")
    return {"role": "system" if role == "developer" else role, "content": content}


def _text(content: Any, where: str) -> str:
    """The text of a message's content: text, null, or a list of text parts."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise bad_request(f"{where} is neither text nor a list of parts", param=where)
    try:
        return text_of_parts(content)
    except ValueError as error:
        raise bad_request(f"{where}: {error}", param=where) from error


def _call(call_id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    return {"id": str(call_id), "type": "function", "function": {"name": str(name), "arguments": arguments}}


def _result(call_id: Any, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": str(call_id), "content": text}


def _function_tool(tool: Mapping[str, Any], parameters: Any) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description") or "", "parameters": parameters}
    return {"type": "function", "function": function}


def _usage(reply: Answer, prompt: str, sampled: str) -> dict[str, Any]:
    counts = {prompt: reply.request.num_tokens, sampled: len(reply.ids)}
    return {**counts, "total_tokens": sum(counts.values())}
