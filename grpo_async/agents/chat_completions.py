"""OpenAI's Chat Completions, and the older Completions.

POST /v1/chat/completions
    messages            roles system, developer (= system), user, assistant, tool; content as text or text parts
    tools, tool_choice  functions; "auto" and "none" (the calls in the text are then left there)
    stop, seed, n       as in the API; n > 1 gives siblings, and not as a stream
    max_tokens, max_completion_tokens, stream, stream_options.include_usage, logprobs
    return_token_ids    as in vLLM: adds `prompt_token_ids` and each choice's `token_ids`
    temperature, top_p, top_k, min_p, repetition_penalty, response_format      see session.py
    ignored             metadata, user, ...
    refused             images, audio, top_logprobs > 0, functions, tool_choice required or named
    answers             have `reasoning_content` beside `content` where the policy wrote thinking

POST /v1/completions
    prompt              text or token ids; what begins with an earlier prompt and its text continues the recorded ids
    stop, seed, n, max_tokens, stream, logprobs (0 or 1: of the sampled tokens)
    refused             several prompts, suffix, echo, best_of > 1
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from grpo_async.agents.calls import (
    Call,
    Exchange,
    Reply,
    changed,
    event,
    number_of,
    objects_of,
    refuse,
    sampling_of,
    stop_strings_of,
    text_of,
)

_DONE = b"data: [DONE]\n\n"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_MAX_REPLIES = 128


class ChatCompletion(Exchange):
    """One request of Chat Completions."""

    def __init__(self, body: Mapping[str, Any], model: str, kept: dict[Any, Any]) -> None:
        super().__init__(body, model, kept)
        self.num_replies = _num_replies(body, is_stream=self.is_stream)
        for name in ("functions", "function_call", "audio"):
            if body.get(name):
                raise refuse(f"{name} is not supported; use tools", param=name)
        if body.get("top_logprobs"):
            raise refuse(
                "top_logprobs is not supported; logprobs has those of the sampled tokens", param="top_logprobs"
            )
        self.call = Call(
            messages=self._read("messages", _message),
            tools=self._read("tools", _tool),
            tool_choice=body.get("tool_choice") or "auto",
            stop=stop_strings_of(body.get("stop"), "stop"),
            max_tokens=number_of(body, "max_completion_tokens", "max_tokens", kind=int),
            response_format=body.get("response_format"),
            with_logprobs=bool(body.get("logprobs")),
            **_sampling(body),
        )

    def answer(self, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = []
        for index, reply in enumerate(replies):
            message: dict[str, Any] = {
                "role": "assistant",
                "content": reply.content if reply.content or not reply.tool_calls else None,
                "refusal": None,
            }
            if reply.reasoning:
                message["reasoning_content"] = reply.reasoning
            if reply.tool_calls:
                message["tool_calls"] = [_written(call) for call in reply.tool_calls]
            choices.append(self._choice(reply, index, message=message, logprobs=self._logprobs(reply)))
        answer = self._head("chat.completion", replies[0].created) | {"choices": choices, "usage": _usage(replies)}
        if self._body.get("return_token_ids"):
            answer["prompt_token_ids"] = list(replies[0].prompt_ids)
        return answer

    def begin(self) -> Iterator[bytes]:
        yield self._chunk({"role": "assistant", "content": ""})

    def text(self, piece: str) -> Iterator[bytes]:
        yield self._chunk({"content": piece})

    def end(self, reply: Reply, given: int) -> Iterator[bytes]:
        if reply.reasoning:
            yield self._chunk({"reasoning_content": reply.reasoning})
        if len(reply.content) > given:
            yield self._chunk({"content": reply.content[given:]})
        if reply.tool_calls:
            calls = [{"index": index, **_written(call)} for index, call in enumerate(reply.tool_calls)]
            yield self._chunk({"tool_calls": calls})
        choice = self._choice(reply, 0, delta={}, logprobs=self._logprobs(reply))
        last = self._head("chat.completion.chunk", 0.0) | {"choices": [choice]}
        if self._body.get("return_token_ids"):
            last["prompt_token_ids"] = list(reply.prompt_ids)
        yield event(last)
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield event(self._head("chat.completion.chunk", 0.0) | {"choices": [], "usage": _usage([reply])})
        yield _DONE

    def _head(self, kind: str, created: float) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.id}", "object": kind, "created": int(created), "model": self.model}

    def _chunk(self, delta: Mapping[str, Any]) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        return event(self._head("chat.completion.chunk", 0.0) | {"choices": [choice]})

    def _choice(self, reply: Reply, index: int, **fields: Any) -> dict[str, Any]:
        choice = {"index": index, **fields, "finish_reason": reply.finish_reason, "stop_reason": reply.stop_sequence}
        if self._body.get("return_token_ids"):
            choice["token_ids"] = list(reply.ids)
        return choice

    def _logprobs(self, reply: Reply) -> dict[str, Any] | None:
        if not self.call.with_logprobs:
            return None
        content = [
            {"token": token, "logprob": logprob, "bytes": list(token.encode()), "top_logprobs": []}
            for token, logprob in zip(reply.tokens, reply.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}


class Completion(Exchange):
    """One request of Completions."""

    def __init__(self, body: Mapping[str, Any], model: str, kept: dict[Any, Any]) -> None:
        super().__init__(body, model, kept)
        self.num_replies = _num_replies(body, is_stream=self.is_stream)
        refused = changed(body, suffix="", echo=False, best_of=1)
        if refused:
            raise refuse(f"{refused[0]} is not supported", param=refused[0])
        prompt = body.get("prompt")
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        is_ids = isinstance(prompt, list) and all(type(token) is int and 0 <= token < 1 << 31 for token in prompt)
        if not prompt or not (isinstance(prompt, str) or is_ids):
            raise refuse("prompt has to be one text, or one list of token ids", param="prompt")
        logprobs = number_of(body, "logprobs", kind=int)
        if logprobs is not None and logprobs > 1:
            raise refuse("logprobs > 1 is not supported; 1 has those of the sampled tokens", param="logprobs")
        limit = number_of(body, "max_tokens", kind=int)
        self.call = Call(
            prompt=prompt,
            stop=stop_strings_of(body.get("stop"), "stop"),
            max_tokens=16 if limit is None else limit,  # the API's own default
            with_logprobs=logprobs is not None,
            **_sampling(body),
        )

    def answer(self, replies: Sequence[Reply]) -> dict[str, Any]:
        choices = [self._choice(reply, index, reply.content) for index, reply in enumerate(replies)]
        return self._head(replies[0].created) | {"choices": choices, "usage": _usage(replies)}

    def begin(self) -> Iterator[bytes]:
        yield from ()

    def text(self, piece: str) -> Iterator[bytes]:
        choice = {"index": 0, "text": piece, "logprobs": None, "finish_reason": None}
        yield event(self._head(0.0) | {"choices": [choice]})

    def end(self, reply: Reply, given: int) -> Iterator[bytes]:
        yield event(self._head(reply.created) | {"choices": [self._choice(reply, 0, reply.content[given:])]})
        if (self._body.get("stream_options") or {}).get("include_usage"):
            yield event(self._head(reply.created) | {"choices": [], "usage": _usage([reply])})
        yield _DONE

    def _head(self, created: float) -> dict[str, Any]:
        return {"id": f"cmpl-{self.id}", "object": "text_completion", "created": int(created), "model": self.model}

    def _choice(self, reply: Reply, index: int, text: str) -> dict[str, Any]:
        logprobs = None
        if self.call.with_logprobs:
            starts = [sum(map(len, reply.tokens[:place])) for place in range(len(reply.tokens))]
            logprobs = {
                "tokens": list(reply.tokens),
                "token_logprobs": list(reply.logprobs),
                "top_logprobs": None,
                "text_offset": starts,
            }
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reply.finish_reason}
        if self._body.get("return_token_ids"):
            choice |= {"token_ids": list(reply.ids), "prompt_token_ids": list(reply.prompt_ids)}
        return choice


def _num_replies(body: Mapping[str, Any], *, is_stream: bool) -> int:
    wanted = number_of(body, "n", kind=int)
    count = 1 if wanted is None else int(wanted)
    if not 1 <= count <= (1 if is_stream else _MAX_REPLIES):
        raise refuse(f"n is {count}; it may be 1 to {_MAX_REPLIES}, and 1 for a stream", param="n")
    return count


def _sampling(body: Mapping[str, Any]) -> dict[str, Any]:
    """What both APIs say of sampling, for `Call`."""
    return {
        "sampling": sampling_of(body),
        "seed": number_of(body, "seed", kind=int),
        "ignored": changed(
            body,
            frequency_penalty=0,
            presence_penalty=0,
            logit_bias={},
            min_tokens=0,
            ignore_eos=False,
        ),
    }


def _usage(replies: Sequence[Reply]) -> dict[str, int]:
    prompt, sampled = len(replies[0].prompt_ids), sum(len(reply.ids) for reply in replies)
    return {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled}


def _message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = _ROLES.get(str(message.get("role")))
    if role is None:
        raise refuse(f"{where}.role is {message.get('role')!r}; there are {', '.join(_ROLES)}", param=f"{where}.role")
    read: dict[str, Any] = {"role": role, "content": text_of(message.get("content"), f"{where}.content")}
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise refuse(f"{where} has no tool_call_id", param=f"{where}.tool_call_id")
        read["tool_call_id"] = message["tool_call_id"]
    if role == "assistant" and message.get("tool_calls"):
        calls = objects_of(message, "tool_calls")
        for call in calls:
            if not isinstance(call.get("function"), Mapping) or not isinstance(call["function"].get("name"), str):
                raise refuse(f"{where}.tool_calls has a call without a function's name", param=f"{where}.tool_calls")
        read["tool_calls"] = calls
    if isinstance(message.get("name"), str):
        read["name"] = message["name"]
    return read


def _tool(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    function = tool.get("function")
    if tool.get("type") != "function" or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise refuse(f"{where} is not a function with a name; other kinds of tools are not supported", param=where)
    return tool


def _written(call: Mapping[str, Any]) -> dict[str, Any]:
    """A call with its arguments as JSON text."""
    function = call["function"]
    arguments = json.dumps(function["arguments"], ensure_ascii=False)
    return {**call, "function": {"name": function["name"], "arguments": arguments}}
