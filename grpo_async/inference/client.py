"""Asynchronous client of the rollout surface: token ids in, token ids + logprobs + policy versions out.

Invariant: what a server has streamed is never lost. When a connection breaks in the middle, the request goes on from
prompt + tokens received so far, and those tokens keep the logprobs and versions they were sampled with.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import httpx
from pydantic import ValidationError

from grpo_async.errors import BadResponseError, ServerUnavailableError
from grpo_async.inference.retry import error_for_status, is_retriable
from grpo_async.inference.surface import GENERATE_PATH, GenerateChunk, GenerateRequest
from grpo_async.records import FinishReason
from grpo_async.retry import RetryPolicy

logger = logging.getLogger(__name__)

_CONNECTIONS_PER_POOL = 8

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

    def add(self, chunk: GenerateChunk) -> None:
        """Append a chunk.

        Raises:
            BadResponseError: logprobs that are missing, too few, or not finite.
        """
        if len(chunk.logprobs) != len(chunk.token_ids):
            raise BadResponseError(
                f"the server sent {len(chunk.token_ids)} tokens with {len(chunk.logprobs)} logprobs; every token needs one"
            )
        if not all(math.isfinite(logprob) for logprob in chunk.logprobs):
            raise BadResponseError(f"the server sent a logprob that is not finite: {chunk.logprobs}")
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.policy_versions.extend([chunk.policy_version] * len(chunk.token_ids))
        if chunk.finish_reason is not None:
            self.finish_reason = FinishReason(chunk.finish_reason)


class _Pool:
    """A few connections. httpx looks at every connection of a pool for every request, which is quadratic in the number of
    requests in flight (256 of them cost a third of the trainer's CPU), so many small pools stand beside each other."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.num_requests = 0

    @asynccontextmanager
    async def stream(self, body: bytes, headers: dict[str, str]) -> AsyncIterator[httpx.Response]:
        self.num_requests += 1
        try:
            async with self.http.stream("POST", GENERATE_PATH, content=body, headers=headers) as response:
                yield response
        finally:
            self.num_requests -= 1


class InferenceClient:
    """Use as an async context manager inside the loop that calls it.

    Args:
        url: base address of the server, such as http://127.0.0.1:8000.
        token: bearer token, or None.
        max_connections: requests expected in flight at once; more are possible.
        request_timeout_s: longest silence of the server within a request.
        retry: the retry rule.
        transport: replaces the network (tests).
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        max_connections: int,
        request_timeout_s: float,
        retry: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._retry = retry or RetryPolicy()
        certificates = httpx.create_ssl_context(trust_env=False)  # loading them takes longer than all the rest
        self._pools = [
            _Pool(
                httpx.AsyncClient(
                    base_url=url,
                    headers={"authorization": f"Bearer {token}"} if token else {},
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                    timeout=httpx.Timeout(request_timeout_s, connect=min(30.0, request_timeout_s)),
                    verify=certificates,
                    transport=transport,
                    trust_env=False,  # a proxy variable must not see prompts and tokens
                )
            )
            for _ in range(-(-max_connections // _CONNECTIONS_PER_POOL))
        ]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        for pool in self._pools:
            await pool.http.aclose()

    async def generate(self, request: GenerateRequest, *, on_tokens: OnTokens | None = None) -> Generation:
        """Run one request to its end.

        Raises:
            RequestRejectedError: 4xx, at once.
            ServerUnavailableError: connection errors or >= 500 until the last retry.
            BadResponseError: an answer that cannot be used.
        """
        generation = Generation()
        began = time.monotonic()
        attempt = 0
        while True:
            received = len(generation.token_ids)
            try:
                await self._stream(self._continuation(request, generation), generation, on_tokens)
                break
            except Exception as error:
                if generation.finish_reason is not None:
                    break  # everything had arrived; only the end of the stream was lost
                if not is_retriable(error):
                    raise
                if len(generation.token_ids) > received:
                    attempt = 0  # it made progress: this is a new failure, not the same one again
                if attempt >= self._retry.max_retries:
                    raise ServerUnavailableError(
                        f"request {request.request_id} failed {attempt + 1} times in a row; the last error was "
                        f"{type(error).__name__}: {error}"
                    ) from error
                if generation.token_ids and generation.token_ids[-1] in request.stop_token_ids:
                    generation.finish_reason = FinishReason.STOP
                    break
                if len(generation.token_ids) >= request.max_tokens:
                    generation.finish_reason = FinishReason.LENGTH
                    break
                await asyncio.sleep(self._retry.delay_s(attempt))
                attempt += 1
        generation.duration_s = time.monotonic() - began
        return generation

    @staticmethod
    def _continuation(request: GenerateRequest, generation: Generation) -> GenerateRequest:
        if not generation.token_ids:
            return request
        return request.model_copy(
            update={
                "token_ids": [*request.token_ids, *generation.token_ids],
                "max_tokens": request.max_tokens - len(generation.token_ids),
            }
        )

    async def _stream(self, request: GenerateRequest, generation: Generation, on_tokens: OnTokens | None) -> None:
        body = request.model_dump_json().encode()
        headers = {"content-type": "application/json"}
        pool = min(self._pools, key=lambda pool: pool.num_requests)
        async with pool.stream(body, headers) as response:
            if response.status_code >= 400:
                raise error_for_status(response.status_code, await response.aread())
            async for line in response.aiter_lines():
                if not line:
                    continue
                chunk = _parse_chunk(line)
                generation.add(chunk)
                if on_tokens is not None and chunk.token_ids:
                    on_tokens(len(chunk.token_ids), chunk.policy_version)
                if chunk.finish_reason == "abort":  # the server is going away: go on elsewhere or later
                    generation.finish_reason = None
                    raise ServerUnavailableError("the inference server aborted the request")
                if chunk.error is not None:
                    raise ServerUnavailableError(f"the inference server failed while generating: {chunk.error}")
        if generation.finish_reason is None:
            raise ServerUnavailableError("the inference server ended the answer without a finish reason")


def _parse_chunk(line: str) -> GenerateChunk:
    try:
        return GenerateChunk.model_validate_json(line)
    except ValidationError as error:
        raise BadResponseError(f"the server sent a line that is not a chunk: {line[:200]!r}") from error
