"""Holds requests that arrive from the beginning of a pause until /resume, so that they enter the engine with the salt of the
version that is then served. Used from one event loop."""

from __future__ import annotations

import asyncio


class GateBrokenError(Exception):
    """The engine died: a request that waited will not be served."""


class Gate:
    """Open, closed, or broken for good."""

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
