"""Chooses the server of each request, on the event loop: the least loaded one, unless another has what the request needs.

Affinity is a path, such as "g12/r3": rollout 3 of group 12. The server that had "g12/r3" before has its whole context in its
prefix cache, one that had another request of "g12" has the prompt. Such a server is taken first, as long as it has at most 8
requests more in flight than the least loaded one. Servers A and B are idle, and 16 rollouts of g12 begin at the same time:

    r0          A    loads 0 0: the first of the least loaded; g12 is A's now
    r1 .. r8    A    loads 1 0 to 8 0: never more than 8 above B's
    r9          B    loads 9 0: 9 > 0 + 8. g12/r9 is B's, g12 stays A's
    r10         A    loads 9 1: 9 <= 1 + 8
    r11         B    loads 10 1
    2nd turns   r0 to A, r9 to B, each to its own context

A server that is fenced loses its requests at once: each ends with FencedError, and its caller asks for another server.
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

_MARGIN = 8
_MOST_HOMES = 16_384
"""Affinities remembered, the last used ones; far more than are in flight, so that one that is forgotten is over."""


class Endpoint(Protocol):
    """A server, as far as requests need it. Two of the same index and instance are the same server."""

    @property
    def index(self) -> int: ...

    @property
    def name(self) -> str: ...

    @property
    def url(self) -> str: ...

    @property
    def instance_id(self) -> str:
        """Sent with every request, so that no other life of the server takes it; empty: any may."""


class ServingServers(Protocol):
    """Where requests may go; see fleet.Fleet."""

    def serving(self) -> Sequence[Endpoint]: ...

    def subscribe(self, listener: Callable[[], None]) -> None:
        """Call `listener`, from any thread, whenever `serving` has changed."""

    def suspect(self, index: int) -> None:
        """A request to this server failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedServer:
    """An Endpoint that never changes."""

    index: int
    name: str
    url: str
    instance_id: str = ""


class FixedServers:
    """ServingServers that nobody watches: for scripts and tests."""

    num_events = 0

    def __init__(self, urls: Sequence[str]) -> None:
        self._servers = [FixedServer(index=index, name=url, url=url) for index, url in enumerate(urls)]

    def serving(self) -> Sequence[FixedServer]:
        """All, always."""
        return self._servers

    def subscribe(self, listener: Callable[[], None]) -> None:
        """There is nothing to tell."""

    def suspect(self, index: int) -> None:
        """There is nobody to ask."""


class FencedError(ServerUnavailableError):
    """The server of a request was taken out while it ran; never leaves the client."""


Key = tuple[int, str]


@dataclass(slots=True, eq=False)
class Route:
    """A server from the moment that it serves until it is taken out, and its requests in flight. When it serves again that is a
    new route."""

    server: Endpoint
    requests: set[asyncio.Timeout] = field(default_factory=set)

    @property
    def load(self) -> int:
        return len(self.requests)


class Router:
    """Used on one event loop; the changes of the servers may come from any thread.

    Args:
        servers: where requests may go.
        wait_timeout_s: longest wait while no server serves.
        on_unused: called with a route that was taken out, once none of its requests is left.
    """

    def __init__(
        self, servers: ServingServers, *, wait_timeout_s: float, on_unused: Callable[[Route], None] = lambda _: None
    ) -> None:
        self._servers = servers
        self._wait_timeout_s = wait_timeout_s
        self._on_unused = on_unused
        self._routes: dict[Key, Route] = {}
        self._homes: OrderedDict[str, Key] = OrderedDict()
        self._is_open = asyncio.Event()  # some server serves
        self._loop: asyncio.AbstractEventLoop | None = None

    @asynccontextmanager
    async def lease(self, affinity: str = "", *, avoid: int | None = None) -> AsyncIterator[Route]:
        """The way to a server for one request; waits while none serves.

        Args:
            affinity: what requests with a common context share, see above; empty: nothing.
            avoid: index of a server to be taken only when there is no other.

        Raises:
            FencedError: the server was taken out before the end of the `with` block, which was cancelled for that.
            DeadlineError: no server within the time.
        """
        if self._loop is None:
            self._attach(asyncio.get_running_loop())
        if not self._routes:
            await self._wait()
        route = self._choose(affinity, avoid)
        request = asyncio.timeout(None)
        route.requests.add(request)
        try:
            async with request:  # ended by the fence
                yield route
        except TimeoutError as error:
            if not request.expired():
                raise
            raise FencedError(f"{route.server.name} was taken out") from error
        finally:
            route.requests.discard(request)
            self._let_go(route)

    def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: there are no requests any more
                loop.call_soon_threadsafe(self._refresh)

        self._servers.subscribe(tell)
        self._refresh()

    def _refresh(self) -> None:
        """Take over which servers serve."""
        serving = {(server.index, server.instance_id): server for server in self._servers.serving()}
        for key in [key for key in self._routes if key not in serving]:
            route = self._routes.pop(key)
            for affinity in [affinity for affinity, home in self._homes.items() if home == key]:
                del self._homes[affinity]
            for request in route.requests:
                if not request.expired():
                    request.reschedule(0.0)
            self._let_go(route)
        for key, server in serving.items():
            if key not in self._routes:
                self._routes[key] = Route(server)
        if self._routes:
            self._is_open.set()
        else:
            self._is_open.clear()

    def _let_go(self, route: Route) -> None:
        key = route.server.index, route.server.instance_id
        if not route.requests and self._routes.get(key) is not route:
            self._on_unused(route)

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._wait_timeout_s):
                while not self._routes:  # it may be gone again by the time that this runs
                    await self._is_open.wait()
        except TimeoutError as error:
            raise DeadlineError(
                "an inference server that serves", waited_s=self._wait_timeout_s, setting="inference.startup_timeout_s"
            ) from error

    def _choose(self, affinity: str, avoid: int | None) -> Route:
        least = min(self._routes.values(), key=lambda route: (route.server.index == avoid, route.load))
        if not affinity:
            return least
        group = affinity.rpartition("/")[0] or affinity
        chosen = self._home(affinity, least, avoid) or self._home(group, least, avoid) or least
        key = chosen.server.index, chosen.server.instance_id
        self._homes.setdefault(group, key)
        if affinity != group:
            self._homes[affinity] = key
        self._homes.move_to_end(group)
        self._homes.move_to_end(affinity)
        while len(self._homes) > _MOST_HOMES:
            self._homes.popitem(last=False)
        return chosen

    def _home(self, affinity: str, least: Route, avoid: int | None) -> Route | None:
        """The server that has this affinity, if it may be taken."""
        key = self._homes.get(affinity)
        route = None if key is None else self._routes[key]
        if route is None or route.server.index == avoid or route.load > least.load + _MARGIN:
            return None
        return route
