"""Asynchronous client of the rollout surface: token ids in, token ids + logprobs + policy versions out.

Invariant: what a server has streamed is never lost. When a request breaks in the middle, it goes on from prompt + tokens received
so far, there or on another server, and those tokens keep the logprobs and versions they were sampled with.

    the server is fenced                 on another one, or when there is one again; not an attempt
    the server aborts the request        again at once; not an attempt, unless it has aborted 4 times in a row without a token
    the connection breaks, or >= 500     an attempt: again after a delay, on another server if there is one; and the server is
                                         reported, so that it is fenced before the next attempt if it is dead
    4xx, an answer that cannot be used   raised at once

`max_retries` bounds the attempts in a row without a token.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from pydantic import ValidationError

from grpo_async.errors import BadResponseError, ServerUnavailableError
from grpo_async.inference.connect import error_for_status, trusted_certificates
from grpo_async.inference.connections import Connections
from grpo_async.inference.router import Endpoint, FencedError, Route, Router, ServingServers
from grpo_async.inference.surface import GenerateChunk, GenerateRequest
from grpo_async.records import FinishReason
from grpo_async.utils.retry import RetryPolicy

logger = logging.getLogger(__name__)

_FREE_ABORTS = 3
"""Aborts in a row without a token that are not attempts: several pushes may follow each other while a request waits."""

_CHUNKS_PER_LIMIT = 4
"""Of a stream, at least, in the time that nothing may be heard for."""

OnTokens = Callable[[int, int], None]
"""Called with (number of new tokens, policy version that sampled them) as they arrive."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """What one request produced so far. The three lists have equal length, one entry per sampled token."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    policy_versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    duration_s: float = 0.0
    started_at: float = 0.0  # seconds since the epoch
    waits: list[tuple[float, float]] = field(default_factory=list)
    """When the request was with no server: (start, end), seconds since the epoch."""
    first_token_s: float | None = None  # as the first server counts it, from the request's arrival

    def add(self, chunk: GenerateChunk) -> None:
        """Append a chunk.

        Raises:
            BadResponseError: logprobs that are missing, too few, or not finite.
        """
        if len(chunk.logprobs) != len(chunk.token_ids):
            raise BadResponseError(
                f"the server sent {len(chunk.token_ids)} tokens with {len(chunk.logprobs)} logprobs; every token needs one"
            )
        if not all(map(math.isfinite, chunk.logprobs)):
            raise BadResponseError(f"the server sent a logprob that is not finite: {chunk.logprobs}")
        if self.first_token_s is None:
            self.first_token_s = chunk.first_token_s
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.policy_versions.extend([chunk.policy_version] * len(chunk.token_ids))
        if chunk.finish_reason is not None:
            self.finish_reason = FinishReason(chunk.finish_reason)


class ServerAnswer(Protocol):
    """See connections.Answer."""

    @property
    def status(self) -> int: ...

    async def read(self) -> bytes: ...

    def lines(self) -> AsyncIterator[bytes]: ...


class ServerConnections(Protocol):
    """How requests reach one server; see connections.Connections."""

    def post(self, body: bytes) -> AbstractAsyncContextManager[ServerAnswer]: ...

    async def aclose(self) -> None: ...


class _AbortedError(ServerUnavailableError):
    """The server ended the request before its end; never leaves the client."""


class InferenceClient:
    """Use as an async context manager inside the loop that calls it.

    Args:
        servers: where requests may go.
        token: bearer token, or None.
        request_timeout_s: longest silence of a server within a request.
        progress_timeout_s: longest time without tokens after which somebody takes the run for one that stands still.
        wait_timeout_s: longest wait of a request while no server serves.
        retry: the retry rule.
        authority: PEM file of trusted certificates; None: those of the system.
        connect: makes the connections to the server at an address; None: over the network.
    """

    def __init__(
        self,
        servers: ServingServers,
        *,
        token: str | None,
        request_timeout_s: float,
        wait_timeout_s: float,
        progress_timeout_s: float = math.inf,
        retry: RetryPolicy | None = None,
        authority: Path | None = None,
        connect: Callable[[str], ServerConnections] | None = None,
    ) -> None:
        self._retry = retry or RetryPolicy()
        self._longest_flush_interval_s = min(request_timeout_s, progress_timeout_s) / _CHUNKS_PER_LIMIT
        self._servers = servers
        self._router = Router(servers, wait_timeout_s=wait_timeout_s, on_unused=self._close_connections)
        self._connections: dict[Route, ServerConnections] = {}
        self._closing: set[asyncio.Task[None]] = set()
        certificates = trusted_certificates(authority)
        self._connect: Callable[[str], ServerConnections] = connect or (
            lambda url: Connections(url, token=token, request_timeout_s=request_timeout_s, certificates=certificates)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        for route in list(self._connections):
            self._close_connections(route)
        await asyncio.gather(*self._closing)

    def _connections_to(self, route: Route) -> ServerConnections:
        connections = self._connections.get(route)
        if connections is None:
            connections = self._connections[route] = self._connect(route.server.url)
        return connections

    def _close_connections(self, route: Route) -> None:
        connections = self._connections.pop(route, None)
        if connections is not None:
            task = asyncio.get_running_loop().create_task(connections.aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_tokens: OnTokens | None = None,
        affinity: str = "",
        partial: Generation | None = None,
    ) -> Generation:
        """Run one request to its end.

        Args:
            request: its `instance_id` is set to that of the server it goes to, its `flush_interval_s` is shortened where the
                stream would else be silent for too long.
            on_tokens: called as tokens arrive; not for those that are in `partial`.
            partial: is filled and returned, so that others see the tokens as they arrive; may hold the first of them, from before
                a resume.
            affinity: what requests with a common context share, such as "group/rollout"; see `router`.

        Raises:
            RequestRejectedError: 4xx, at once.
            ServerUnavailableError: connection errors or >= 500 until the last retry.
            BadResponseError: an answer that cannot be used.
            DeadlineError: no server served within `wait_timeout_s`.
        """
        if partial is not None:
            partial.finish_reason = partial.finish_reason or _reason_to_end(request, partial)
            if partial.finish_reason is not None:
                return partial
        generation = Generation() if partial is None else partial
        began = time.monotonic()
        generation.started_at = without_server_since = time.time()
        attempt = num_aborts = 0
        route: Route | None = None
        avoid: int | None = None
        while True:
            received = len(generation.token_ids)
            try:
                async with self._router.lease(affinity, avoid=avoid) as route:
                    generation.waits.append((without_server_since, time.time()))
                    continuation = self._continuation(request, generation, route.server)
                    await self._stream(route, continuation, generation, on_tokens)
                break
            except Exception as error:
                without_server_since = time.time()
                if generation.finish_reason is not None:
                    break  # everything had arrived; only the end of the stream was lost
                if not isinstance(error, ServerUnavailableError):
                    raise
                generation.finish_reason = _reason_to_end(request, generation)
                if generation.finish_reason is not None:
                    break
                if len(generation.token_ids) > received:
                    attempt = num_aborts = 0  # it made progress: this is a new failure, not the same one again
                avoid = None
                if isinstance(error, FencedError):
                    continue
                if isinstance(error, _AbortedError):
                    num_aborts += 1
                    if num_aborts <= _FREE_ABORTS:
                        continue
                elif route is not None:
                    avoid = route.server.index
                    self._servers.suspect(avoid)
                if attempt >= self._retry.max_retries:
                    raise ServerUnavailableError(
                        f"request {request.request_id} failed {attempt + 1} times in a row; the last error was "
                        f"{type(error).__name__}: {error}"
                    ) from error
                await asyncio.sleep(self._retry.delay_s(attempt))
                attempt += 1
        generation.duration_s = time.monotonic() - began
        return generation

    def _continuation(self, request: GenerateRequest, generation: Generation, server: Endpoint) -> GenerateRequest:
        """What this server is asked for: the rest of the request."""
        update: dict[str, object] = {}
        if request.flush_interval_s > self._longest_flush_interval_s:
            update["flush_interval_s"] = self._longest_flush_interval_s
        if server.instance_id:
            update["instance_id"] = server.instance_id
        if generation.token_ids:
            update["token_ids"] = [*request.token_ids, *generation.token_ids]
            update["max_tokens"] = request.max_tokens - len(generation.token_ids)
        return request.model_copy(update=update) if update else request

    async def _stream(
        self, route: Route, request: GenerateRequest, generation: Generation, on_tokens: OnTokens | None
    ) -> None:
        async with self._connections_to(route).post(request.model_dump_json().encode()) as answer:
            if answer.status >= 400:
                raise error_for_status(answer.status, await answer.read())  # within the session's request_timeout_s
            async for line in answer.lines():  # within the session's request_timeout_s
                chunk = _parse_chunk(line)
                generation.add(chunk)
                if on_tokens is not None and chunk.token_ids:
                    on_tokens(len(chunk.token_ids), chunk.policy_version)
                if chunk.finish_reason == "abort":
                    generation.finish_reason = None
                    raise _AbortedError("the inference server aborted the request")
                if chunk.error is not None:
                    raise ServerUnavailableError(f"the inference server failed while generating: {chunk.error}")
        if generation.finish_reason is None:
            raise ServerUnavailableError("the inference server ended the answer without a finish reason")


def _reason_to_end(request: GenerateRequest, generation: Generation) -> FinishReason | None:
    """Why a generation whose last line was lost is complete, or None."""
    if generation.token_ids and generation.token_ids[-1] in request.stop_token_ids:
        return FinishReason.STOP
    if len(generation.token_ids) >= request.max_tokens:
        return FinishReason.LENGTH
    return None


def _parse_chunk(line: bytes) -> GenerateChunk:
    try:
        return GenerateChunk.model_validate_json(line)
    except ValidationError as error:
        raise BadResponseError(f"the server sent a line that is not a chunk: {line[:200]!r}") from error
