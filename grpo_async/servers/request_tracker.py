"""What a server keeps of its requests, whichever engine it has: the gate of a pause, the requests inside the engine, busy time.

Knows neither HTTP nor an engine. Used from one event loop.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable


class EngineDeadError(Exception):
    """The engine will not answer; the message says why."""


class Gate:
    """Holds requests that arrive from the beginning of a pause until /resume, so that each enters the engine under the version that
    is then served. Open, closed, or broken for good."""

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
        """Refuse all requests from now on, also those that wait."""
        self._failure = reason
        self._opened.set()

    async def wait(self) -> None:
        """Return in a moment in which the gate is open; nothing else runs between that moment and the caller's next line.

        Raises:
            EngineDeadError: the gate was broken down.
        """
        while not self._opened.is_set():
            await self._opened.wait()  # ended by /resume, the end of the engine, or the client's disconnect
        if self._failure is not None:
            raise EngineDeadError(self._failure)


class RequestTracker:
    """One for each server. `clock` gives monotonic seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.instance_id = secrets.token_hex(8)
        self.gate = Gate()
        self.num_active = 0
        """Requests that are being answered, including those that wait at the gate."""
        self.in_engine: dict[object, None] = {}
        """Requests that the engine has not ended, in the order of their entry."""
        self._empty = asyncio.Event()
        self._empty.set()
        self._is_paused = False
        self._clock = clock
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @property
    def is_paused(self) -> bool:
        """Whether the engine is frozen between two tokens."""
        return self._is_paused

    @property
    def busy_s(self) -> float:
        """Seconds in which at least one request was in the engine and the engine was not paused."""
        return self._busy_s + (self._clock() - self._busy_since if self._busy_since is not None else 0.0)

    def enter(self, request: object) -> None:
        """`request` is in the engine from now on."""
        self.in_engine[request] = None
        self._empty.clear()
        self._update_busy()

    def leave(self, request: object) -> None:
        """The engine has ended `request`, or nobody waits for it anymore. May be called twice."""
        self.in_engine.pop(request, None)
        if not self.in_engine:
            self._empty.set()
        self._update_busy()

    def set_paused(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        self._update_busy()

    async def wait_until_empty(self) -> None:
        """Return when no request is in the engine. The caller brings the deadline."""
        await self._empty.wait()

    def _update_busy(self) -> None:
        is_busy = bool(self.in_engine) and not self._is_paused
        if is_busy and self._busy_since is None:
            self._busy_since = self._clock()
        elif not is_busy and self._busy_since is not None:
            self._busy_s += self._clock() - self._busy_since
            self._busy_since = None
