"""Watches servers from a thread of its own: finds those that start, sends heartbeats to those that serve, judges both.

    STARTING, DOWN    asked /health, then the engine, then what it is     `found` or `not_found`
    READY, SERVING    heartbeat through the engine, then what it is       `note`, `restarted` or `lost`

A heartbeat that fails:

    refused or reset, twice in a row           lost at once: nobody listens any more
    no answer within heartbeat_timeout_s       lost, unless weights were pushed meanwhile: an engine that loads them is silent,
                                               and a push has deadlines of its own
    answers >= 400, /health says dead          lost at once
    answers >= 400 for heartbeat_timeout_s     lost, unless weights are pushed

Asking is a loop over time, because HTTP offers nothing to await for "is still there"; `nudge` cuts a pause short.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import CancelledError
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, TypeVar

import httpx
from pydantic import ValidationError

from grpo_async.errors import BadResponseError, InferenceError, RequestRejectedError, RunError
from grpo_async.inference.connect import authorization, error_for_status, trusted_certificates
from grpo_async.inference.server import FleetSettings, Server, ServerState
from grpo_async.inference.surface import INFO_PATH, ServerInfo

logger = logging.getLogger(__name__)

_STARTING_INTERVAL_S = 0.25
_LONGEST_QUESTION_S = 10.0
"""To a server that serves nothing."""
_END_S = 10.0

Result = TypeVar("Result")


class Watched(Protocol):
    """What is told of the servers; from the monitor's thread. A record that is not the current one any more is ignored."""

    def server(self, index: int) -> Server: ...

    def apply_mark(self) -> int:
        """Of this moment, for `applied_since`."""

    def applied_since(self, mark: int) -> bool:
        """Whether servers were loading weights at any moment since the mark was taken."""

    def note(self, server: Server, info: ServerInfo) -> None:
        """It answers."""

    def give_up(self, server: Server, reason: str) -> None:
        """It will never take part."""

    def found(self, server: Server, info: ServerInfo) -> None:
        """A server that was looked for answers."""

    def not_found(self, server: Server, reason: str) -> None:
        """A server that was looked for does not."""

    def restarted(self, server: Server, info: ServerInfo) -> None:
        """It answers, and is in another life than it was."""

    def lost(self, server: Server, reason: str) -> None:
        """It is dead or hangs."""


class Probe:
    """Questions to the server at `url`; each raises httpx.TransportError when the connection is refused or breaks twice (one that
    was kept open may have been closed meanwhile), and InferenceError for an answer that says no."""

    def __init__(self, url: str, *, token: str | None, authority: Path | None) -> None:
        self._http = httpx.AsyncClient(  # the caller limits every question
            base_url=url,
            headers=authorization(token),
            verify=trusted_certificates(authority),
            limits=httpx.Limits(max_connections=None),
            timeout=None,  # the caller limits every question
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._http.aclose()

    async def health(self) -> None:
        """Returns when the server says that it can generate."""
        await self._get("/health")

    async def engine(self) -> None:
        """Returns when the engine core answers; /health stays 200 on a server whose engine hangs."""
        await self._get("/is_paused")

    async def info(self) -> ServerInfo:
        """What the server says of itself."""
        response = await self._get(INFO_PATH)
        try:
            return ServerInfo.model_validate_json(response.content)
        except ValidationError as error:
            raise BadResponseError(f"{INFO_PATH} does not answer with a ServerInfo: {error}") from error

    async def _get(self, path: str) -> httpx.Response:
        try:
            response = await self._http.get(path)  # the caller limits every question
        except httpx.TransportError:
            response = await self._http.get(path)  # the caller limits every question
        if response.status_code >= 400:
            raise error_for_status(response.status_code, response.content)
        return response


class Monitor:
    """A daemon thread with an event loop; one task for each server."""

    def __init__(
        self,
        watched: Watched,
        urls: Sequence[str],
        *,
        token: str | None,
        settings: FleetSettings,
        authority: Path | None,
    ) -> None:
        self._watched = watched
        self._settings = settings
        self._probes = [Probe(url, token=token, authority=authority) for url in urls]
        self._nudged = [asyncio.Event() for _ in urls]
        self._questions: dict[
            int, tuple[Server, asyncio.Timeout]
        ] = {}  # those that are open, and what each server was then
        self._wrong_since: dict[int, float] = {}
        self._silent: set[int] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._started = threading.Event()
        self._ending = asyncio.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="server-monitor", daemon=True)

    def start(self) -> None:
        """Begin to watch."""
        self._thread.start()
        if not self._started.wait(_END_S):
            raise RunError(f"the monitor of the inference servers did not start within {_END_S:.0f} s")

    def close(self) -> None:
        """End the thread; returns after 10 s at the latest."""
        self._call(self._ending.set)
        if self._thread.is_alive():
            self._thread.join(_END_S)

    def nudge(self, index: int) -> None:
        """Look at a server at once; what it was asked before its state changed is of no use any more, and is not waited for."""
        self._call(lambda: self._nudge(index))

    def infos(self, indices: Sequence[int], *, timeout_s: float) -> dict[int, ServerInfo]:
        """What these servers say of themselves. One that does not answer in time is left out, and not asked again before its next
        heartbeat."""
        if self._loop is None or not self._thread.is_alive():
            return {}
        asking = asyncio.run_coroutine_threadsafe(self._infos(indices, timeout_s), self._loop)
        try:
            return asking.result(timeout=2 * timeout_s)
        except (TimeoutError, CancelledError):
            asking.cancel()
            return {}

    def _call(self, function: Callable[[], None]) -> None:
        loop = self._loop
        if loop is None or not self._thread.is_alive():
            return
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not loop.is_closed():  # it ended between the two lines: nobody is watched any more
                raise

    def _nudge(self, index: int) -> None:
        self._nudged[index].set()
        if index in self._questions:
            server, question = self._questions[index]
            if server is not self._watched.server(index) and not question.expired():
                question.reschedule(0.0)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._started.set()
        tasks = [asyncio.create_task(self._watch(index)) for index in range(len(self._probes))]
        await self._ending.wait()  # for `close`, or as long as the process
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=_END_S / 2)

    async def _watch(self, index: int) -> None:
        async with self._probes[index]:
            while self._watched.server(index).state is not ServerState.GONE:  # `close` cancels it
                self._nudged[index].clear()
                try:
                    await self._look_at(self._watched.server(index))
                except Exception:  # a watch that ends would leave a dead server unnoticed
                    logger.exception("looking at inference server %d failed; it is looked at again", index)
                try:
                    async with asyncio.timeout(self._interval_s(index)):
                        await self._nudged[index].wait()
                except TimeoutError:
                    pass

    def _interval_s(self, index: int) -> float:
        interval_s = self._settings.heartbeat_interval_s
        if self._watched.server(index).state is ServerState.STARTING:
            return min(interval_s, _STARTING_INTERVAL_S)
        return interval_s

    async def _look_at(self, server: Server) -> None:
        if server.state.is_member:
            await self._heartbeat(server)
        elif server.state is not ServerState.GONE:
            await self._search(server)

    async def _search(self, server: Server) -> None:
        """Look for a server that does not serve."""
        probe = self._probes[server.index]
        is_healthy = False

        async def ask() -> ServerInfo:
            nonlocal is_healthy
            await probe.health()
            is_healthy = True
            await probe.engine()
            return await probe.info()

        try:
            info = await self._within(server, _LONGEST_QUESTION_S, ask)
        except TimeoutError:
            self._watched.not_found(server, f"no answer for {_LONGEST_QUESTION_S:.0f} s")
        except (httpx.TransportError, InferenceError) as error:
            if hopeless := _why_hopeless(error, is_healthy=is_healthy):
                self._watched.give_up(server, hopeless)
            else:
                self._watched.not_found(server, _words(error))
        else:
            self._silent.discard(server.index)
            self._wrong_since.pop(server.index, None)
            self._watched.found(server, info)

    async def _heartbeat(self, server: Server) -> None:
        probe, index, limit_s = self._probes[server.index], server.index, self._settings.heartbeat_timeout_s
        mark = self._watched.apply_mark()

        async def ask() -> ServerInfo:
            await probe.engine()
            return await probe.info()

        try:
            info = await self._within(server, limit_s, ask)
        except TimeoutError:
            self._silent.add(index)
            if not self._watched.applied_since(mark):
                silence = f"its engine did not answer for {limit_s:g} s (inference.heartbeat_timeout_s)"
                self._watched.lost(server, silence)
        except httpx.TransportError as error:
            self._watched.lost(server, f"its connection broke: {_words(error)}")
        except InferenceError as error:
            await self._judge(server, error, mark)
        else:
            self._silent.discard(index)
            self._wrong_since.pop(index, None)
            if info.instance_id != server.instance_id:
                self._watched.restarted(server, info)
            else:
                self._watched.note(server, info)

    async def _judge(self, server: Server, error: InferenceError, mark: int) -> None:
        """An answer came, and it was no good one."""
        try:
            await self._within(server, _LONGEST_QUESTION_S, self._probes[server.index].health)
        except InferenceError as death:
            self._watched.lost(server, _words(death))
            return
        except (TimeoutError, httpx.TransportError):
            pass  # the next heartbeat finds out
        now = time.monotonic()
        since = self._wrong_since.setdefault(server.index, now)
        if now - since > self._settings.heartbeat_timeout_s and not self._watched.applied_since(mark):
            self._watched.lost(server, f"for {now - since:.0f} s its engine has answered with errors: {_words(error)}")

    async def _within(self, server: Server, limit_s: float, ask: Callable[[], Awaitable[Result]]) -> Result:
        """Raises TimeoutError after `limit_s`, or when the server's state changes meanwhile."""
        async with asyncio.timeout(limit_s) as question:
            self._questions[server.index] = server, question
            try:
                return await ask()
            finally:
                del self._questions[server.index]

    async def _infos(self, indices: Sequence[int], timeout_s: float) -> dict[int, ServerInfo]:
        async def ask(index: int) -> ServerInfo | None:
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._probes[index].info()
            except (TimeoutError, httpx.TransportError, InferenceError):
                self._silent.add(index)
                return None

        asked = [index for index in indices if index not in self._silent]
        answers = await asyncio.gather(*(ask(index) for index in asked))
        return {index: info for index, info in zip(asked, answers, strict=True) if info is not None}


def _why_hopeless(error: Exception, *, is_healthy: bool) -> str:
    """What to change when it is no use to ask again; "" otherwise. `is_healthy`: it says that it can generate."""
    if isinstance(error, RequestRejectedError) and error.status in (401, 403):
        return f"{error}: set the variable GRPO_ASYNC_TOKEN to the token that this server was started with"
    is_unknown = isinstance(error, RequestRejectedError) and error.status in (404, 405)
    if is_healthy and (is_unknown or isinstance(error, BadResponseError)):
        return f"it is no server of grpo-async ({error}); start it with `grpo-async serve-vllm CONFIG`, not with vLLM's own command"
    if isinstance(error, httpx.ConnectError) and "CERTIFICATE_VERIFY_FAILED" in str(error):
        return (
            f"its certificate is refused ({error}); inference.tls.authority names the PEM file of the certificates that are "
            "trusted, and the address in the URL has to be one of those in the certificate"
        )
    return ""


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if isinstance(error, httpx.TransportError) else str(error)
