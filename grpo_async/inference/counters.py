"""Adds up what servers count of themselves; a server that restarts begins at 0, the sums go on."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from grpo_async.inference.surface import ServerInfo


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerCounters:
    """Since the run began to watch. Neither ever becomes smaller."""

    busy_s: float
    """Seconds in which a server was generating, in the mean over all servers of the run; one that is down is not busy."""
    generated_tokens: int
    """Of all servers together."""


class CounterSums:
    """May be used from any thread.

    One of two servers was busy for 10 s and made 500 tokens, died, and has now been busy for 2 s with 90 tokens; the other was
    busy for 11 s with 600: busy_s = (10 + 2 + 11) / 2 = 11.5, generated_tokens = 500 + 90 + 600 = 1190.
    """

    def __init__(self, *, num_servers: int) -> None:
        self._num_servers = num_servers
        self._lock = threading.Lock()
        self._largest: dict[tuple[int, str], tuple[float, int]] = {}  # of each life of each server

    def note(self, index: int, info: ServerInfo) -> None:
        """What server `index` says now; words that come late, after newer ones, change nothing."""
        life = index, info.instance_id
        with self._lock:
            busy_s, tokens = self._largest.get(life, (0.0, 0))
            self._largest[life] = max(busy_s, info.busy_s), max(tokens, info.generated_tokens)

    def total(self) -> ServerCounters:
        """The sums as far as they are known."""
        with self._lock:
            values = list(self._largest.values())
        return ServerCounters(
            busy_s=sum(busy_s for busy_s, _ in values) / self._num_servers,
            generated_tokens=sum(tokens for _, tokens in values),
        )
