"""Chooses the server of each request, on the event loop: the least loaded one, unless another has the request's context cached.

Affinity is a path, such as "g12/r3": rollout 3 of group 12. The server of earlier requests of "g12/r3" has the whole context in its
prefix cache; one that had another request of "g12" has the prompt. Such a server is preferred, as long as it has at most 8
requests more in flight than the least loaded one. Servers A and B are idle, and 16 rollouts of g12 start at the same time:

    r0          A    loads 0 0: the first of the least loaded; g12 is A's now
    r1 .. r8    A    loads 1 0 to 8 0: never more than 8 above B's
    r9          B    loads 9 0: 9 > 0 + 8. g12/r9 is B's, g12 stays A's
    r10         A    loads 9 1: 9 <= 1 + 8
    r11         B    loads 10 1
    2nd turns   r0 to A, r9 to B, each to its own context

A fenced server loses its requests at once: each ends with FencedError, and its caller asks for another server.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from grpo_async.errors import DeadlineError, ServerUnavailableError

MAX_INT32 = (1 << 31) - 1
ANY_VERSION = range(MAX_INT32 + 1)
_MAX_EXTRA_REQUESTS = 8  # above the least loaded server
_MAX_AFFINITIES = 16_384  # far more than are in flight, so that forgotten ones are over


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ServerAddress:
    """A server as requests need it. Two with the same index and instance are the same server."""

    index: int
    name: str
    url: str
    instance_id: str = ""  # of this start; sent with every request, so that no other accepts it. Empty: any does


class Servers(Protocol):
    """The servers for requests: `fleet.Fleet`, or `FixedServers`."""

    versions: range  # from the version that every serving server has to the newest that was pushed to any

    def serving(self) -> Sequence[ServerAddress]: ...

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener`, from any thread, whenever `serving` has changed."""

    def suspect(self, index: int) -> None:
        """A request to this server failed."""


class FixedServers:
    """Servers without a watcher: for benchmarks and tests."""

    num_changes = 0
    versions = ANY_VERSION

    def __init__(self, urls: Sequence[str]) -> None:
        self._servers = [ServerAddress(index=index, name=url, url=url) for index, url in enumerate(urls)]

    def serving(self) -> Sequence[ServerAddress]:
        return self._servers

    def subscribe(self, listener: Callable[[], None]) -> None: ...

    def suspect(self, index: int) -> None: ...


class FencedError(ServerUnavailableError):
    """The server of a request was fenced while it ran; never leaves the client."""


Key = tuple[int, str]


@dataclass(slots=True, eq=False)
class _Route:
    """A server while it serves, and its requests in flight."""

    server: ServerAddress
    requests: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def key(self) -> Key:
        return self.server.index, self.server.instance_id


class Router:
    """Leases servers to requests on one event loop; changes of the servers may come from any thread."""

    def __init__(self, servers: Servers, *, wait_timeout_s: float) -> None:
        self._servers = servers
        self._wait_timeout_s = wait_timeout_s
        self._routes: dict[Key, _Route] = {}
        self._key_by_affinity: OrderedDict[str, Key] = OrderedDict()
        self._is_open = asyncio.Event()  # some server serves
        self._is_attached = False

    @asynccontextmanager
    async def lease(self, affinity: str = "", *, avoid: int | None = None) -> AsyncIterator[ServerAddress]:
        """Lease the server for one request; waits while no server serves. `avoid`: index of a server to use only if no other is.
        FencedError: the server was fenced before the end of the `with` block, which was therefore cancelled."""
        if not self._is_attached:
            self._attach(asyncio.get_running_loop())
        if not self._routes:
            await self._wait()
        route = self._choose(affinity, avoid)
        request = asyncio.timeout(None)
        route.requests.add(request)
        try:
            async with request:  # cancelled when the server is fenced
                yield route.server
        except TimeoutError as error:
            if not request.expired():
                raise
            raise FencedError(f"{route.server.name} was fenced") from error
        finally:
            route.requests.discard(request)

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed, so there are no requests anymore
                loop.call_soon_threadsafe(self._refresh)

        self._is_attached = True
        self._servers.subscribe(tell)
        self._refresh()

    def _refresh(self) -> None:
        """Update the routes to the servers that serve now."""
        serving = {(server.index, server.instance_id): server for server in self._servers.serving()}
        for key in [key for key in self._routes if key not in serving]:
            for request in self._routes.pop(key).requests:
                if not request.expired():
                    request.reschedule(0.0)
            for affinity in [affinity for affinity, other in self._key_by_affinity.items() if other == key]:
                del self._key_by_affinity[affinity]
        for key, server in serving.items():
            self._routes.setdefault(key, _Route(server))
        if self._routes:
            self._is_open.set()
        else:
            self._is_open.clear()

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                while not self._routes:  # a server may be gone again by the time this runs
                    await self._is_open.wait()
        except TimeoutError as error:
            raise DeadlineError(
                "a serving inference server", waited_s=self._wait_timeout_s, setting="inference.startup_timeout_s"
            ) from error

    def _choose(self, affinity: str, avoid: int | None) -> _Route:
        least = min(self._routes.values(), key=lambda route: (route.server.index == avoid, len(route.requests)))
        if not affinity:
            return least
        group = affinity.rpartition("/")[0] or affinity
        chosen = self._usable_route(affinity, least, avoid) or self._usable_route(group, least, avoid) or least
        self._key_by_affinity.setdefault(group, chosen.key)
        if affinity != group:
            self._key_by_affinity[affinity] = chosen.key
        self._key_by_affinity.move_to_end(group)
        self._key_by_affinity.move_to_end(affinity)
        while len(self._key_by_affinity) > _MAX_AFFINITIES:
            self._key_by_affinity.popitem(last=False)
        return chosen

    def _usable_route(self, affinity: str, least: _Route, avoid: int | None) -> _Route | None:
        """The server with this affinity, if it may be used."""
        key = self._key_by_affinity.get(affinity)
        route = None if key is None else self._routes[key]
        if (
            route is None
            or route.server.index == avoid
            or len(route.requests) > len(least.requests) + _MAX_EXTRA_REQUESTS
        ):
            return None
        return route
