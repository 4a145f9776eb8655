"""A request of ours while it is inside vLLM, and the set of them.

vLLM keeps requests that it has not begun in a queue. When the weights change there, such a request may start from cached
keys and values that the old weights made, since it was salted when it entered. So it is taken out and enters again, and
nobody outside notices. Knows neither vLLM nor HTTP. Used from one event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

_ENTRY_TIMEOUT_S = 30.0  # an entry only sends to the engine core


class Entered(Protocol):
    """A request inside the engine (`compat.RunningRequest`)."""

    async def abort(self) -> None: ...


class Output(Protocol):
    """What the engine says of a request (`compat.EngineOutput`)."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def finish_reason(self) -> str | None: ...


class InFlight:
    """One request, from its entry into the engine to its end.

    Args:
        submit: puts it into the engine; the callback it gets is called for every output, in order.
        take: gets the outputs of the newest entry only, or the exception that ended it.
        on_end: called once, when the engine has ended it.
    """

    def __init__(
        self, submit: Callable[[Callable[[Any], None]], Awaitable[Entered]], take: Callable[[Any], None]
    ) -> None:
        self._submit, self._take = submit, take
        self._entry = 0
        self._entered = asyncio.Event()
        self._running: Entered | None = None
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

    def _deliver(self, entry: int, output: Output | Exception) -> None:
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
