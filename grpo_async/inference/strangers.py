"""Keeps connections that say nothing from taking all of a server's descriptors. A protocol for uvicorn.

A connection is a stranger until the headers of its first request are there. It has 10 s for them. Where strangers hold half of the
descriptors that the rest of the process leaves, the oldest goes for each new one. A request without the token ends its connection
(guard), so nobody without it holds one for longer.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

_HEADERS_TIMEOUT_S = 10.0
_Base: Any = AutoHTTPProtocol  # h11 or httptools, whichever is installed


class StrangersProtocol(_Base):  # type: ignore[misc]
    """What `uvicorn.Config(http=...)` takes."""

    _strangers: ClassVar[dict[StrangersProtocol, asyncio.TimerHandle]] = {}  # the oldest first

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._strangers[self] = self.loop.call_later(_HEADERS_TIMEOUT_S, transport.close)
        descriptor = transport.get_extra_info(
            "socket"
        ).fileno()  # the lowest free one: as many are open, strangers included
        if descriptor + len(self._strangers) > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
            oldest = next(iter(self._strangers))
            oldest._is_known()
            oldest.transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None:
            self._is_known()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_known()
        super().connection_lost(exc)

    def _is_known(self) -> None:
        deadline = self._strangers.pop(self, None)
        if deadline is not None:
            deadline.cancel()
