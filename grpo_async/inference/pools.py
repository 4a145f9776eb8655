"""The connections to one server, for many requests at once."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx

from grpo_async.inference.connect import authorization
from grpo_async.inference.surface import GENERATE_PATH

_CONNECTIONS_PER_POOL = 8
_HEADERS = {"content-type": "application/json"}


class ConnectionPools:
    """Many small pools beside each other: httpx looks at every connection of a pool for every request, which is quadratic in the
    number of requests in flight (256 of them cost a third of the trainer's CPU).

    Args:
        url: base address of the server.
        token: bearer token, or None.
        max_connections: requests expected in flight at once; more are possible.
        request_timeout_s: longest silence of the server within a request.
        certificates: those trusted for HTTPS.
        transport: replaces the network (tests).
    """

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        max_connections: int,
        request_timeout_s: float,
        certificates: ssl.SSLContext,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._pools = [
            _Pool(
                httpx.AsyncClient(
                    base_url=url,
                    headers=authorization(token),
                    limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
                    timeout=httpx.Timeout(request_timeout_s, connect=min(30.0, request_timeout_s)),
                    verify=certificates,
                    transport=transport,
                    trust_env=False,  # a proxy variable must not see prompts and tokens
                )
            )
            for _ in range(-(-max_connections // _CONNECTIONS_PER_POOL))
        ]

    @asynccontextmanager
    async def post(self, body: bytes) -> AsyncIterator[httpx.Response]:
        """Send a generation request; the answer's lines are still to be read."""
        pool = min(self._pools, key=lambda pool: pool.num_requests)
        pool.num_requests += 1
        try:
            request = pool.http.stream("POST", GENERATE_PATH, content=body, headers=_HEADERS)
            async with request as response:  # waits: request_timeout_s of the client
                yield response
        finally:
            pool.num_requests -= 1

    async def aclose(self) -> None:
        """Close every connection."""
        for pool in self._pools:
            await pool.http.aclose()


class _Pool:
    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self.num_requests = 0
