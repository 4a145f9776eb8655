"""What the server knows of itself beyond vLLM: the gate of a pause, requests of ours inside the engine, policy version, salt,
and the counters of /rollout/info. Knows neither vLLM nor HTTP. Used from one event loop.

vLLM keeps requests that it has not begun in a queue. When the weights change there, such a request may start from cached
keys and values that the old weights made, since it was salted when it entered. So it is taken out and enters again, and
nobody outside notices.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from grpo_async.servers.vllm.stream import TokenStream

if TYPE_CHECKING:
    from grpo_async.servers.vllm.compat import EngineOutput, RunningRequest

_ENTRY_TIMEOUT_S = 30.0  # an entry only sends to the engine core


class GateBrokenError(Exception):
    """The engine died: a request that waited will not be served."""


class Gate:
    """Holds requests that arrive from the beginning of a pause until /resume, so that they enter the engine with the salt of the
    version that is then served. Open, closed, or broken for good."""

    def __init__(self) -> None:
        self._opened = asyncio.Event()
        self._opened.set()
        self._failure: str | None = None

    @property
    def is_open(self) -> bool:
        return self._opened.is_set()

    def close(self) -> None:
        if self._failure is None:
            self._opened.clear()

    def open(self) -> None:
        self._opened.set()

    def break_down(self, reason: str) -> None:
        """Refuse everybody from now on, also those who wait."""
        self._failure = reason
        self._opened.set()

    async def wait(self) -> None:
        """Return in a moment in which the gate is open; nothing else runs between that moment and the caller's next line.

        Raises:
            GateBrokenError: the engine died.
        """
        while not self._opened.is_set():
            await self._opened.wait()  # ended by /resume, the end of the engine, or the client's disconnect
        if self._failure is not None:
            raise GateBrokenError(self._failure)


class InFlight:
    """One request, from its entry into the engine to its end.

    Args:
        submit: puts it into the engine; the callback it gets is called for every output, in order.
        take: gets the outputs of the newest entry only, or the exception that ended it.
        on_end: called once, when the engine has ended it.
    """

    def __init__(
        self, submit: Callable[[Callable[[Any], None]], Awaitable[RunningRequest]], take: Callable[[Any], None]
    ) -> None:
        self._submit, self._take = submit, take
        self._entry = 0
        self._entered = asyncio.Event()
        self._running: RunningRequest | None = None
        self._left = False
        self.on_end: Callable[[], None] = lambda: None
        self.has_tokens = False
        self.ended = False

    async def enter(self) -> None:
        """Put it into the engine. Raises what `submit` raises."""
        self._entry += 1
        entry = self._entry
        self._entered.clear()
        try:
            self._running = await self._submit(lambda output: self._deliver(entry, output))
        finally:
            self._entered.set()
        if self._left:  # while it was entering
            await self._running.abort()

    async def enter_again(self) -> None:
        """Take it out and put it in anew, if the engine has not begun to answer.

        Raises:
            TimeoutError: its first entry does not end.
        """
        async with asyncio.timeout(_ENTRY_TIMEOUT_S):
            await self._entered.wait()
        if self.has_tokens or self.ended or self._left or self._running is None:
            return
        self._entry += 1  # deaf to the end that the abort brings
        await self._running.abort()
        try:
            await self.enter()
        except Exception as error:  # noqa: BLE001 - whatever the engine raises belongs to this request's client
            self._deliver(self._entry, error)

    async def leave(self) -> None:
        """Nobody wants it any more."""
        self._left = True
        if self._running is not None:
            await self._running.abort()

    def _deliver(self, entry: int, output: EngineOutput | Exception) -> None:
        if entry != self._entry or self.ended:
            return
        if isinstance(output, Exception) or output.finish_reason is not None:
            self.ended = True
        if not isinstance(output, Exception) and output.token_ids:
            self.has_tokens = True
        self._take(output)
        if self.ended:
            self.on_end()


class InFlightRequests:
    """Those that the engine has not ended, in the order of their entry."""

    def __init__(self, *, on_change: Callable[[], None]) -> None:
        self._requests: dict[InFlight, None] = {}
        self._on_change = on_change
        self._empty = asyncio.Event()
        self._empty.set()

    def __len__(self) -> int:
        return len(self._requests)

    @contextmanager
    def holding(self, request: InFlight) -> Iterator[None]:
        """Count `request` from here until the engine ended it, or until the block is left."""
        self._requests[request] = None
        self._empty.clear()
        request.on_end = lambda: self._discard(request)
        self._on_change()
        try:
            yield
        finally:
            self._discard(request)

    async def wait_until_empty(self) -> None:
        """Return when the engine has ended all of them. The caller brings the deadline."""
        await self._empty.wait()  # every caller has a timeout around it

    async def renew(self) -> None:
        """Let all that have no token yet enter again, in their order."""
        for request in list(self._requests):
            await request.enter_again()

    def _discard(self, request: InFlight) -> None:
        if self._requests.pop(request, request) is None:
            if not self._requests:
                self._empty.set()
            self._on_change()


class ServerState:
    """Used from one event loop. `clock` gives monotonic seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.instance_id = secrets.token_hex(8)
        self.version = 0
        self.generated_tokens = 0
        self.active_requests = 0
        """Those that wait at the gate included."""
        self.gate = Gate()
        self.in_flight = InFlightRequests(on_change=self._update_busy)
        self._num_updates = 0
        self._streams: set[TokenStream] = set()
        self._paused = False
        self._clock = clock
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @property
    def salt(self) -> str:
        """Of every request that enters the engine now. Versions may come again (a trainer that went back to a checkpoint), so
        the number of updates is part of it."""
        return f"{self._num_updates}:{self.version}"

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def busy_s(self) -> float:
        """Union of the time in which the engine had at least one request of ours and was not paused."""
        return self._busy_s + (self._clock() - self._busy_since if self._busy_since is not None else 0.0)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """One active request."""
        self.active_requests += 1
        try:
            yield
        finally:
            self.active_requests -= 1

    @contextmanager
    def streaming(self, request: InFlight, stream: TokenStream) -> Iterator[None]:
        """`request` is in the engine, and its tokens go to `stream`."""
        self._streams.add(stream)
        try:
            with self.in_flight.holding(request):
                yield
        finally:
            self._streams.discard(stream)

    def set_paused(self, paused: bool) -> None:
        self._paused = paused
        self._update_busy()

    def change_version(self, version: int) -> None:
        """Stamp tokens that arrive from now on with `version`, and send what was sampled before."""
        self.version = version
        self._num_updates += 1
        for stream in self._streams:
            stream.flush()

    def _update_busy(self) -> None:
        busy = len(self.in_flight) > 0 and not self._paused
        if busy and self._busy_since is None:
            self._busy_since = self._clock()
        elif not busy and self._busy_since is not None:
            self._busy_s += self._clock() - self._busy_since
            self._busy_since = None
