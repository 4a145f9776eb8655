"""The connections to one server, for many requests at once; each in flight has its own, and a free one is used again.

aiohttp and not httpx, which the rest of this package uses: a request costs a fifth of the CPU (benchmarks/NOTES.md), and what this
thread computes in Python the trainer waits for.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp

from grpo_async.errors import ServerUnavailableError
from grpo_async.inference.connect import authorization
from grpo_async.inference.surface import GENERATE_PATH

_HEADERS = {"content-type": "application/json", "accept": "application/x-ndjson", "user-agent": "grpo-async"}
_LONGEST_CONNECT_S = 30.0
_KEEPALIVE_S = 300.0
"""Below the 600 s after which our servers close an idle connection, so that no request is sent into one that is being closed."""


class BrokenConnectionError(ServerUnavailableError):
    """No connection, one that broke, or silence; never leaves the client."""


class Answer:
    """An answer that has begun. Both methods raise BrokenConnectionError."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response

    @property
    def status(self) -> int:
        return self._response.status

    async def read(self) -> bytes:
        """All of it."""
        return await self._response.read()  # within the session's request_timeout_s

    async def lines(self) -> AsyncIterator[bytes]:
        """The lines that are not empty, as they arrive, without their ends."""
        rest = b""
        async for data in self._response.content.iter_any():  # within the session's request_timeout_s
            *whole, rest = (rest + data).split(b"\n") if rest else data.split(b"\n")
            for line in whole:
                if line:
                    yield line
        if rest:
            yield rest


class Connections:
    """Use on one event loop.

    Args:
        url: base address of the server.
        token: bearer token, or None.
        request_timeout_s: longest silence of the server within a request.
        certificates: those trusted for HTTPS.
    """

    def __init__(self, url: str, *, token: str | None, request_timeout_s: float, certificates: ssl.SSLContext) -> None:
        self._url = url.rstrip("/") + GENERATE_PATH
        self._request_timeout_s = request_timeout_s
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=certificates, keepalive_timeout=_KEEPALIVE_S),
            headers={**_HEADERS, **authorization(token)},
            skip_auto_headers=("accept-encoding",),
            timeout=aiohttp.ClientTimeout(
                total=None, sock_read=request_timeout_s, sock_connect=min(_LONGEST_CONNECT_S, request_timeout_s)
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,  # a proxy variable must not see prompts and tokens
        )

    @asynccontextmanager
    async def post(self, body: bytes) -> AsyncIterator[Answer]:
        """Send a generation request; the answer's lines are still to be read.

        Raises:
            BrokenConnectionError: also for what breaks within the `with` block.
        """
        try:
            async with await self._begin(body) as response:  # within the session's request_timeout_s
                yield Answer(response)
        except aiohttp.SocketTimeoutError as error:
            raise BrokenConnectionError(f"{self._url} was silent for {self._request_timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise BrokenConnectionError(f"{type(error).__name__}: {error}") from error

    async def _begin(self, body: bytes) -> aiohttp.ClientResponse:
        """Until the answer begins. The session's limits are of connecting and of silence; looking up a name and sending have
        none."""
        limit_s = _LONGEST_CONNECT_S + self._request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                return await self._session.post(self._url, data=body, allow_redirects=False)
        except aiohttp.ClientError:
            raise
        except TimeoutError as error:
            raise BrokenConnectionError(f"{self._url} did not take the request within {limit_s:g} s") from error

    async def aclose(self) -> None:
        """Close every connection."""
        await self._session.close()
