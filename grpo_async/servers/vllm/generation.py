"""POST /rollout/generate and /rollout/score, straight on vLLM's AsyncLLM, without its OpenAI layer.

A request waits at the gate while the server is paused, enters the engine with the salt of the version that is served then,
and leaves it when its client disconnects.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import orjson
from pydantic import ValidationError

from grpo_async.inference.guard import Receive, Send
from grpo_async.inference.surface import GenerateRequest, ScoreAnswer, ScoreRequest
from grpo_async.servers.vllm import compat
from grpo_async.servers.vllm.answers import (
    DisconnectedError,
    RefusedError,
    read_body,
    send_error,
    send_json,
    status_and_message,
    unless_disconnected,
)
from grpo_async.servers.vllm.state import GateBrokenError, InFlight, ServerState
from grpo_async.servers.vllm.stream import TokenStream

logger = logging.getLogger("vllm.grpo_async")

_NUM_AT_ONCE = 4  # of the warm-up
_FILTERS: dict[str, Any] = {"top_p": 0.9, "top_k": 5, "min_p": 0.01}
_NDJSON = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]


class Generation:
    """Both handlers answer for themselves, errors included."""

    def __init__(self, state: ServerState) -> None:
        self._state = state

    async def generate(self, engine: Any, receive: Receive, send: Send) -> None:
        await self._guarded(self._generate(engine, receive, send), send)

    async def score(self, engine: Any, receive: Receive, send: Send) -> None:
        await self._guarded(self._score(engine, receive, send), send)

    async def _guarded(self, answer: Any, send: Send) -> None:
        """Errors from before the answer began."""
        try:
            with self._state.answering():
                await answer  # ended by the client's disconnect
        except DisconnectedError:
            pass  # nobody reads
        except (RefusedError, ValidationError) as error:
            await send_error(send, *status_and_message(error))
        except (compat.VLLMClientError, ValueError) as error:
            await send_error(send, 400, str(error))
        except (compat.EngineDeadError, GateBrokenError) as error:
            await send_error(send, 503, f"the engine is dead: {error}")

    async def _generate(self, engine: Any, receive: Receive, send: Send) -> None:
        request = GenerateRequest.model_validate_json(await read_body(receive))
        self._check(engine, request)
        stream = TokenStream(flush_interval_s=request.flush_interval_s)
        in_flight = InFlight(
            lambda deliver: compat.submit(engine, request, deliver), lambda output: self._take(stream, output)
        )

        async def work() -> None:
            await self._state.gate.wait()
            # nothing may run between the gate and the engine: see Gate.wait
            with self._state.streaming(in_flight, stream):
                await in_flight.enter()
                await _write_lines(stream, send)

        try:
            await unless_disconnected(work(), receive)
        finally:
            # also for a stream that ended with an error of ours: the engine does not know of it and would go on
            await in_flight.leave()

    def _take(self, stream: TokenStream, output: compat.EngineOutput | Exception) -> None:
        """Called by the engine's output task for every batch of tokens, in order."""
        version = self._state.version
        if isinstance(output, Exception):
            return stream.fail(f"the engine failed: {type(output).__name__}: {output}", version=version)
        self._state.generated_tokens += len(output.token_ids)
        return stream.add(output.token_ids, output.logprobs, version=version, finish=output.finish_reason)

    async def _score(self, engine: Any, receive: Receive, send: Send) -> None:
        token_ids = ScoreRequest.model_validate_json(await read_body(receive)).token_ids
        limit = compat.describe(engine).max_model_len
        if len(token_ids) > limit:
            raise RefusedError(400, f"{len(token_ids)} tokens to score are more than max_model_len {limit}")
        _check_ids(engine, token_ids)
        answer = await unless_disconnected(self._score_once_open(engine, token_ids), receive)
        await send_json(send, 200, answer.model_dump())

    async def _score_once_open(self, engine: Any, token_ids: list[int]) -> ScoreAnswer:
        """A pause that aborts what is in flight makes it wait and begin anew: half a score is of no use to anybody."""
        while True:
            await self._state.gate.wait()
            result: asyncio.Future[tuple[compat.EngineOutput, int]] = asyncio.get_running_loop().create_future()

            def take(output: compat.EngineOutput | Exception, result: asyncio.Future[Any] = result) -> None:
                if result.done():
                    return
                if isinstance(output, compat.EngineDeadError):
                    result.set_exception(output)
                elif isinstance(output, Exception):
                    result.set_exception(RefusedError(500, f"the engine failed: {type(output).__name__}: {output}"))
                elif output.finish_reason is not None:
                    result.set_result((output, self._state.version))

            in_flight = InFlight(lambda deliver: compat.submit_score(engine, token_ids, deliver), take)
            try:
                with self._state.in_flight.holding(in_flight):
                    await in_flight.enter()
                    output, version = await result  # the engine's answer or end, or the client's disconnect
            finally:
                await in_flight.leave()
            if output.finish_reason != "abort":
                return ScoreAnswer(logprobs=list(output.scores), policy_version=version)

    def _check(self, engine: Any, request: GenerateRequest) -> None:
        mine = self._state.instance_id
        if request.instance_id and request.instance_id != mine:
            raise RefusedError(
                503,
                f"this request is meant for server {request.instance_id}, and this is {mine}: it has restarted since",
            )
        limit = compat.describe(engine).max_model_len
        wanted = len(request.token_ids) + request.max_tokens
        if wanted > limit:
            raise RefusedError(
                400,
                f"a prompt of {len(request.token_ids)} tokens and max_tokens {request.max_tokens} are {wanted} tokens, "
                f"more than max_model_len {limit}",
            )
        _check_ids(engine, [*request.token_ids, *request.stop_token_ids])


async def _write_lines(stream: TokenStream, send: Send) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": _NDJSON})
    async for chunk in stream.chunks():
        line = orjson.dumps(chunk.model_dump()) + b"\n"
        await send({"type": "http.response.body", "body": line, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _check_ids(engine: Any, token_ids: Sequence[int]) -> None:
    size = compat.vocabulary_size(engine)
    outside = [token for token in token_ids if not 0 <= token < size]
    if outside:
        raise RefusedError(400, f"the token ids {outside[:5]} are outside the vocabulary of {size} tokens")


async def warm_up(engine: Any) -> None:
    """The first requests of a server, made by itself before anybody is let in: alone, several at once, with filters, and scored.

    vLLM compiles at the first request of a kind, on a machine without its caches for minutes, in which the engine answers nobody:
    heartbeats would take it for one that hangs, and each restart would compile again. Raises what the engine does.
    """
    began = time.monotonic()
    await _generate_once(engine, "alone")
    await asyncio.gather(*(_generate_once(engine, f"among {number}") for number in range(_NUM_AT_ONCE)))
    await asyncio.gather(*(_generate_once(engine, f"filtered {number}", **_FILTERS) for number in range(_NUM_AT_ONCE)))
    await _whole(lambda deliver: compat.submit_score(engine, [0, 0, 0], deliver))
    logger.info("warmed up in %.1f s", time.monotonic() - began)


async def _generate_once(engine: Any, name: str, **fields: Any) -> None:
    request = GenerateRequest(
        request_id=f"warm-up, {name}", token_ids=[0, 0], max_tokens=2, temperature=1.0, ignore_eos=True, **fields
    )
    await _whole(lambda deliver: compat.submit(engine, request, deliver))


async def _whole(submit: Callable[[compat.Deliver], Awaitable[compat.RunningRequest]]) -> None:
    """Until the engine has answered to the end."""
    ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def deliver(output: compat.EngineOutput | Exception) -> None:
        if ended.done():
            return
        if isinstance(output, Exception):
            ended.set_exception(output)
        elif output.finish_reason is not None:
            ended.set_result(None)

    await submit(deliver)
    await ended  # waits: the engine, whose start inference.startup_timeout_s limits
