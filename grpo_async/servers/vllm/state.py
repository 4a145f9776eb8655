"""What the server knows of itself beyond vLLM: policy version, salt, requests of ours, and the counters of /rollout/info."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpo_async.servers.vllm.gate import Gate
from grpo_async.servers.vllm.in_flight import InFlight, InFlightRequests
from grpo_async.servers.vllm.stream import TokenStream


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
