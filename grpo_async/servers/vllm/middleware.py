"""ASGI middleware in front of vLLM's own app (`--middleware`): asks for the token, serves `inference.surface`, passes on
the rest.

/rollout/generate runs straight on vLLM's AsyncLLM, without its OpenAI layer. A client that disconnects aborts its
request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

import orjson
from pydantic import ValidationError

from grpo_async.inference.guard import App, Receive, Scope, Send, TokenGuard
from grpo_async.inference.surface import GENERATE_PATH, INFO_PATH, GenerateRequest, ServerInfo
from grpo_async.servers.vllm import compat
from grpo_async.servers.vllm.control import Control, ControlError
from grpo_async.servers.vllm.state import ServerState
from grpo_async.servers.vllm.stream import TokenStream

logger = logging.getLogger("vllm.grpo_async")

_NDJSON = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]


class RolloutMiddleware:
    """One per API server process; vLLM constructs it with its app."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._guarded = TokenGuard(self._dispatch)
        self._state = ServerState()
        self._control = Control(self._state)
        self._paths = {GENERATE_PATH, INFO_PATH, *(path for _, path in self._control.routes)}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._guarded(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in self._paths:
            return await self._app(scope, receive, send)
        route = scope["method"], scope["path"]
        engine = scope["app"].state.engine_client
        if route == ("POST", GENERATE_PATH):
            return await self._generate(engine, receive, send)
        try:
            if route == ("GET", INFO_PATH):
                answer = self._info(engine).model_dump()
            elif handler := self._control.routes.get(route):
                query = dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))
                answer = await handler(engine, query, await _read_body(receive))
            else:
                raise ControlError(405, f"{route[1]} does not take {route[0]}")
        except (ControlError, ValidationError) as error:
            return await _send_error(send, *_status_and_message(error))
        except Exception as error:
            # whatever the engine raised: the caller gets its words, the traceback is in the log
            logger.exception("%s %s failed", *route)
            return await _send_error(send, 503 if engine.errored else 500, f"{type(error).__name__}: {error}")
        return await _send_json(send, 200, answer)

    def _info(self, engine: Any) -> ServerInfo:
        state = self._state
        changing = {
            "policy_version": state.version,
            "active_requests": state.active_requests,
            "generated_tokens": state.generated_tokens,
            "busy_s": state.busy_s,
        }
        return compat.describe(engine).model_copy(update=changing)

    async def _generate(self, engine: Any, receive: Receive, send: Send) -> None:
        try:
            request = GenerateRequest.model_validate_json(await _read_body(receive))
            _check_lengths_and_ids(engine, request)
        except (ControlError, ValidationError) as error:
            return await _send_error(send, *_status_and_message(error))
        stream = TokenStream(flush_interval_s=request.flush_interval_s)
        with self._state.running(stream):
            try:
                running = await compat.submit(engine, request, lambda output: self._deliver(stream, output))
            except (compat.VLLMClientError, ValueError) as error:
                return await _send_error(send, 400, str(error))
            except compat.EngineDeadError as error:
                return await _send_error(send, 503, f"the engine is dead: {error}")
            await self._answer(stream, running, receive, send)
        return None

    def _deliver(self, stream: TokenStream, output: compat.EngineOutput | Exception) -> None:
        """Called by the engine's output task for every batch of tokens, in order."""
        if isinstance(output, Exception):
            return stream.fail(f"the engine failed: {type(output).__name__}: {output}", version=self._state.version)
        self._state.generated_tokens += len(output.token_ids)
        return stream.add(output.token_ids, output.logprobs, version=self._state.version, finish=output.finish_reason)

    async def _answer(self, stream: TokenStream, running: compat.RunningRequest, receive: Receive, send: Send) -> None:
        writer = asyncio.create_task(_write_lines(stream, send))
        disconnect = asyncio.create_task(_wait_for_disconnect(receive))
        try:
            await asyncio.wait({writer, disconnect}, return_when=asyncio.FIRST_COMPLETED)
            if writer.done():
                writer.result()
        finally:
            writer.cancel()
            disconnect.cancel()
            # also for a stream that ended with an error of ours: the engine does not know of it and would go on
            await running.abort()


async def _write_lines(stream: TokenStream, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _NDJSON})
    async for chunk in stream.chunks():
        line = orjson.dumps(chunk.model_dump()) + b"\n"
        await send({"type": "http.response.body", "body": line, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_body(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ControlError(400, "the client disconnected before its request was complete")
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def _check_lengths_and_ids(engine: Any, request: GenerateRequest) -> None:
    limit = compat.describe(engine).max_model_len
    wanted = len(request.token_ids) + request.max_tokens
    if wanted > limit:
        raise ControlError(
            400,
            f"a prompt of {len(request.token_ids)} tokens and max_tokens {request.max_tokens} are {wanted} tokens, "
            f"more than max_model_len {limit}",
        )
    size = compat.vocabulary_size(engine)
    outside = [token for token in (*request.token_ids, *request.stop_token_ids) if not 0 <= token < size]
    if outside:
        raise ControlError(400, f"the token ids {outside[:5]} are outside the vocabulary of {size} tokens")


def _status_and_message(error: ControlError | ValidationError) -> tuple[int, str]:
    if isinstance(error, ControlError):
        return error.status, str(error)
    problems = (f"{'.'.join(map(str, item['loc'])) or 'body'}: {item['msg']}" for item in error.errors())
    return 400, "; ".join(problems)


async def _send_error(send: Send, status: int, message: str) -> None:
    await _send_json(send, status, {"error": message or HTTPStatus(status).phrase})


async def _send_json(send: Send, status: int, content: Mapping[str, Any]) -> None:
    body = orjson.dumps(content)
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
