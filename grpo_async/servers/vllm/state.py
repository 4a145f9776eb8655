"""What the server knows of itself beyond vLLM: policy version, running streams and the counters of /rollout/info."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from grpo_async.servers.vllm.stream import TokenStream


class ServerState:
    """Used from one event loop. `clock` gives monotonic seconds."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.version = 0
        self.generated_tokens = 0
        self._streams: set[TokenStream] = set()
        self._paused = False
        self._clock = clock
        self._busy_s = 0.0
        self._busy_since: float | None = None

    @property
    def active_requests(self) -> int:
        return len(self._streams)

    @property
    def busy_s(self) -> float:
        """Union of the time in which at least one request ran and the server was not paused."""
        return self._busy_s + (self._clock() - self._busy_since if self._busy_since is not None else 0.0)

    @contextmanager
    def running(self, stream: TokenStream) -> Iterator[None]:
        self._streams.add(stream)
        self._update_busy()
        try:
            yield
        finally:
            self._streams.discard(stream)
            self._update_busy()

    def set_paused(self, paused: bool) -> None:
        self._paused = paused
        self._update_busy()

    def change_version(self, version: int) -> None:
        """Stamp tokens that arrive from now on with `version`, and send what was sampled before."""
        self.version = version
        for stream in self._streams:
            stream.flush()

    def _update_busy(self) -> None:
        busy = bool(self._streams) and not self._paused
        if busy and self._busy_since is None:
            self._busy_since = self._clock()
        elif not busy and self._busy_since is not None:
            self._busy_s += self._clock() - self._busy_since
            self._busy_since = None
