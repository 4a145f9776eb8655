"""Asynchronous client of the rollout API: token ids in, token ids + logprobs + policy versions out.

Invariant: tokens that a server has streamed are never lost. A request that breaks in the middle continues from prompt + received
tokens, on the same server or another, and those tokens keep the logprobs and versions they were sampled with. (Except one with
`structured_outputs`: its constraint begins with the first token, so it starts over.)

    the server is fenced                 continue on another, or when one serves again; not an attempt
    the server aborts the request        again at once; not an attempt, unless it has aborted 4 times in a row without a token
    the connection breaks, or >= 500     an attempt: again after a delay, on another server if there is one; and the server is
                                         reported, so that it is fenced before the next attempt if it is dead
    4xx, an unusable answer              raised at once

It uses aiohttp, not httpx like `control`: a request costs a fifth of the CPU, and the trainer waits while this thread runs Python.
"""

from __future__ import annotations

import asyncio
import math
import time
from array import array
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
import numpy as np
from aiohttp.http_exceptions import HttpProcessingError

from grpo_async.errors import BadResponseError, ServerUnavailableError, message_of
from grpo_async.inference.answer import Answer
from grpo_async.inference.api import KEEP_ALIVE_S, GenerateChunk, GenerateRequest, ScoreAnswer, ScoreRequest
from grpo_async.inference.connect import authorization, error_for_status, trusted_certificates
from grpo_async.inference.router import MAX_INT32, FencedError, Router, ServerAddress, Servers
from grpo_async.records import FinishReason, TaggedMessage, TurnRecord, top_array
from grpo_async.tracking.timeline import SHORTEST_WAIT_S, record
from grpo_async.utils.retry import RetryPolicy
from grpo_async.utils.text import clipped, count

_FREE_ABORTS = 3  # in a row, without a token: several pushes may follow each other while a request waits
_CHUNKS_PER_TIMEOUT = 4  # at least, within the shorter of the two limits of silence

_HEADERS = {"content-type": "application/json", "accept": "application/x-ndjson", "user-agent": "grpo-async"}
_MAX_CONNECT_S = 30.0
_MAX_LINE_BYTES = 1 << 24
_MAX_ERROR_BYTES, _MAX_ERROR_CHARS = 1 << 16, 2000

OnTokens = Callable[[int, int], None]
"""Called with (number of new tokens, policy version that sampled them) as they arrive."""


@dataclass(slots=True, kw_only=True)
class Generation:
    """What one request has produced so far. The three arrays have equal length, one entry per sampled token; `top` has the bytes of
    its likeliest tokens for each (records.TOP), if the request asks for them.

    Not lists: the garbage collector scans those, and with 8 million tokens in flight that stops every thread for 0.2 s.
    """

    token_ids: array[int] = field(default_factory=lambda: array("i"))
    logprobs: array[float] = field(default_factory=lambda: array("f"))
    policy_versions: array[int] = field(default_factory=lambda: array("i"))
    top: bytearray = field(default_factory=bytearray)
    finish_reason: FinishReason | None = None
    stop_reason: str | None = None
    duration_s: float = 0.0
    started_at: float = 0.0  # seconds since the epoch
    waits: list[tuple[float, float]] = field(default_factory=list)  # without a server: (start, end)

    def add(self, chunk: GenerateChunk) -> None:
        """Append a chunk, which `answer.Answer` has checked."""
        self.token_ids.extend(chunk.token_ids)
        self.logprobs.extend(chunk.logprobs)
        self.top += b"".join(chunk.top_logprobs)
        self.policy_versions.extend(array("i", [chunk.policy_version]) * len(chunk.token_ids))
        if chunk.finish_reason not in (None, FinishReason.ABORT):
            self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason

    def clear(self) -> None:
        """Drop all tokens."""
        for column in (self.token_ids, self.logprobs, self.policy_versions, self.top):
            del column[:]

    def turn(self, messages: Sequence[TaggedMessage], **more: Any) -> TurnRecord:
        """This generation as a turn; `messages` and `more` are the other fields of TurnRecord."""
        return TurnRecord(
            output_ids=np.asarray(self.token_ids, np.int32),
            output_logprobs=np.asarray(self.logprobs, np.float32),
            policy_versions=np.asarray(self.policy_versions, np.int32),
            output_top=top_array(bytes(self.top), len(self.token_ids)),
            finish_reason=self.finish_reason or FinishReason.ABORT,
            stop_reason=self.stop_reason,
            messages=messages,
            generation_duration_s=self.duration_s,
            started_at=self.started_at,
            **more,
        )

    def note(self, details: dict[str, Any]) -> None:
        """Add the outcome to the details of its span, and record where it waited for a server."""
        details |= {"tokens": len(self.token_ids), "finish": str(self.finish_reason or "")}
        if self.policy_versions:
            details |= {"version": max(self.policy_versions), "oldest_version": min(self.policy_versions)}
        for start, end in self.waits:
            if end - start >= SHORTEST_WAIT_S:
                record("wait for a server", start, end)


class _AbortedError(ServerUnavailableError):
    """The server ended the request before its end; never leaves the client."""


class InferenceClient:
    """Sends generation requests. It belongs to the event loop of its first request. Close it there, or use it as a context manager.

    A server may be silent for `request_timeout_s` within a request, and a run without tokens for `progress_timeout_s`; a request
    waits for `wait_timeout_s` while no server serves. `vocab_size`: rows of the policy's embedding.
    """

    def __init__(
        self,
        servers: Servers,
        *,
        token: str | None,
        request_timeout_s: float,
        wait_timeout_s: float,
        progress_timeout_s: float = math.inf,
        retry: RetryPolicy | None = None,
        vocab_size: int = MAX_INT32 + 1,
    ) -> None:
        self._servers = servers
        self._vocab_size = vocab_size
        self._router = Router(servers, wait_timeout_s=wait_timeout_s)
        self._retry = retry or RetryPolicy()
        self._max_flush_interval_s = min(request_timeout_s, progress_timeout_s) / _CHUNKS_PER_TIMEOUT
        self._request_timeout_s = request_timeout_s
        self._headers = {**_HEADERS, **authorization(token)}
        self._certificates = trusted_certificates()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def generate(
        self,
        request: GenerateRequest,
        *,
        on_tokens: OnTokens | None = None,
        affinity: str = "",
        partial: Generation | None = None,
    ) -> Generation:
        """Run one request to its end. Raises as the module's docstring says, and DeadlineError when no server served in time.

        `on_tokens` is called as tokens arrive. `partial` is filled and returned, so that others see them, too; it may hold
        those from before a resume. `affinity`: see `router`.
        """
        generation = Generation() if partial is None else partial
        if partial is not None:
            partial.finish_reason = partial.finish_reason or _lost_finish_reason(request, partial)
            if partial.finish_reason is not None:
                return partial
        started = time.monotonic()
        generation.started_at = without_server_since = time.time()
        attempt = num_aborts = 0
        server: ServerAddress | None = None
        avoid: int | None = None
        while True:
            if request.structured_outputs is not None:
                generation.clear()  # the constraint begins with the first token
            received = len(generation.token_ids)
            try:
                async with self._router.lease(affinity, avoid=avoid) as server:
                    generation.waits.append((without_server_since, time.time()))
                    await self._stream(
                        server, self._remaining_request(request, generation, server), generation, on_tokens
                    )
                break
            except ServerUnavailableError as error:
                without_server_since = time.time()
                if generation.finish_reason is not None:
                    break  # everything had arrived; only the end of the stream was lost
                generation.finish_reason = _lost_finish_reason(request, generation)
                if generation.finish_reason is not None:
                    break
                if len(generation.token_ids) > received and request.structured_outputs is None:
                    attempt = num_aborts = 0  # it made progress, so this is a new failure
                avoid = None
                if isinstance(error, FencedError):
                    continue
                if isinstance(error, _AbortedError):
                    num_aborts += 1
                    if num_aborts <= _FREE_ABORTS:
                        continue
                elif server is not None:
                    avoid = server.index
                    self._servers.suspect(avoid)
                if attempt >= self._retry.max_retries:
                    raise ServerUnavailableError(
                        f"request {request.request_id} failed {count(attempt + 1, 'time')} in a row; the last error: "
                        f"{message_of(error)}"
                    ) from error
                await asyncio.sleep(self._retry.delay_s(attempt))
                attempt += 1
        generation.duration_s = time.monotonic() - started
        return generation

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log-probabilities of all tokens but the first under the served policy, at temperature 1. It waits and raises as
        `generate` does."""
        body = ScoreRequest(token_ids=list(token_ids)).model_dump_json().encode()
        attempt = 0
        server: ServerAddress | None = None
        avoid: int | None = None
        while True:
            try:
                async with (
                    self._router.lease("", avoid=avoid) as server,
                    self._post(f"{server.url.rstrip('/')}/rollout/score", body) as (response, _),
                ):
                    content = await response.read()
                    if response.status != 200:
                        raise error_for_status(response.status, content)
                    answer = ScoreAnswer.model_validate_json(content)
                    if answer.policy_version in self._servers.versions:
                        return answer.logprobs
                    raise ServerUnavailableError(
                        f"{server.name} scored with version {answer.policy_version}: it restarted"
                    )
            except FencedError:
                avoid = None
            except ServerUnavailableError:
                if server is not None:
                    avoid = server.index
                    self._servers.suspect(avoid)
                if attempt >= self._retry.max_retries:
                    raise
                await asyncio.sleep(self._retry.delay_s(attempt))
                attempt += 1
            except ValueError as error:
                raise BadResponseError(f"an answer to /rollout/score cannot be read: {message_of(error)}") from error

    def _remaining_request(
        self, request: GenerateRequest, generation: Generation, server: ServerAddress
    ) -> GenerateRequest:
        """The request for this server: without the tokens that have already been received."""
        update: dict[str, object] = {}
        if request.flush_interval_s > self._max_flush_interval_s:
            update["flush_interval_s"] = self._max_flush_interval_s
        if server.instance_id:
            update["instance_id"] = server.instance_id
        if generation.token_ids:
            update["token_ids"] = [*request.token_ids, *generation.token_ids]
            update["max_tokens"] = request.max_tokens - len(generation.token_ids)
        return request.model_copy(update=update) if update else request

    async def _stream(
        self, server: ServerAddress, request: GenerateRequest, generation: Generation, on_tokens: OnTokens | None
    ) -> None:
        answer = Answer(
            server=server.name,
            request=request,
            vocab_size=self._vocab_size,
            oldest_version=self._servers.versions.start,
        )
        url = f"{server.url.rstrip('/')}/rollout/generate"
        async with self._post(url, request.model_dump_json().encode()) as (response, silence):
            if response.status != 200:
                raise error_for_status(response.status, await response.content.read(_MAX_ERROR_BYTES))
            async for line in response.content:  # ended by `silence`
                if not line.strip():
                    continue
                chunk = answer.read(line, newest_version=self._servers.versions.stop - 1)
                generation.add(chunk)
                if chunk.token_ids:
                    silence.reschedule(asyncio.get_running_loop().time() + self._request_timeout_s)
                    if on_tokens is not None:
                        on_tokens(len(chunk.token_ids), chunk.policy_version)
                if chunk.finish_reason is FinishReason.ABORT:
                    raise _AbortedError("the inference server aborted the request")
                if chunk.error is not None:
                    raise ServerUnavailableError(
                        f"the inference server failed while generating: {clipped(chunk.error, _MAX_ERROR_CHARS)}"
                    )
        if generation.finish_reason is None:
            raise ServerUnavailableError("the inference server ended the answer without a finish reason")

    @asynccontextmanager
    async def _post(self, url: str, body: bytes) -> AsyncIterator[tuple[aiohttp.ClientResponse, asyncio.Timeout]]:
        """Send a request. The caller reschedules the limit of silence whenever a line brings tokens: bytes alone are no
        sign of life."""
        session = self._session = self._session or self._open_session()
        limit_s = self._request_timeout_s
        try:
            # the session limits connecting and the wait for the first byte; DNS lookups and sending the body need their own limit
            async with asyncio.timeout(_MAX_CONNECT_S + limit_s) as silence:
                # a redirect would leak the token
                async with session.post(url, data=body, allow_redirects=False) as response:
                    silence.reschedule(asyncio.get_running_loop().time() + limit_s)
                    yield response, silence
        except TimeoutError as error:  # an aiohttp.SocketTimeoutError is one too
            raise ServerUnavailableError(f"{url} was silent for {limit_s:g} s") from error
        except aiohttp.ClientError as error:
            raise ServerUnavailableError(message_of(error)) from error
        except (HttpProcessingError, ValueError) as error:
            raise BadResponseError(f"{url} broke HTTP, or sent a line without an end: {message_of(error)}") from error

    def _open_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=self._certificates, keepalive_timeout=KEEP_ALIVE_S / 2),
            headers=self._headers,
            skip_auto_headers=("accept-encoding",),
            timeout=aiohttp.ClientTimeout(
                total=None,
                sock_read=self._request_timeout_s,
                sock_connect=min(_MAX_CONNECT_S, self._request_timeout_s),
            ),
            read_bufsize=_MAX_LINE_BYTES,
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # a proxy from the environment must not see prompts and tokens
        )


def _lost_finish_reason(request: GenerateRequest, generation: Generation) -> FinishReason | None:
    """The finish reason of a complete generation whose last line was lost; None if tokens are missing."""
    if generation.token_ids and generation.token_ids[-1] in request.stop_token_ids:
        return FinishReason.STOP
    if len(generation.token_ids) >= request.max_tokens:
        return FinishReason.LENGTH
    return None
