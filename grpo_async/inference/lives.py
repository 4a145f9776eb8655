"""What is kept of servers over their lives: what was last heard of each, its failures, and when one that was lost is back.

A server that this run has started is back only in a new life: one that hung and wakes before it is killed must not be. One that
others run is back when it answers again, but not at once if it was lost several times without having served.

Nothing here is locked: `Fleet` calls it with its own lock held.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from grpo_async.inference.server import Server, ServerFailure, ServerState

_LONGEST_RETURN_DELAY_S = 60.0


@dataclass(slots=True)
class _Past:
    """Of one server. Moments are those of the monotonic clock."""

    last_life: str = ""
    last_words: str = "never answered"
    failed_at: float = 0.0
    open_failure: int | None = None  # position in `failures`
    exit_words: str = ""  # of the launcher, when the process has ended; it starts it again by itself
    num_restarts: int = 0
    num_lost: int = 0  # times it was taken out since it last served
    lost_at: float = 0.0


def return_delay_s(num_lost: int) -> float:
    """How long a server that others run is left alone: 0 after the first failure, then 2, 4, 8, ... 60 s."""
    return 0.0 if num_lost < 2 else min(_LONGEST_RETURN_DELAY_S, 2.0 ** (num_lost - 1))


class Lives:
    """The past of every server of a fleet.

    Args:
        num_servers: their indices are 0 to num_servers - 1.
        are_ours: this run has started them, and has them restarted.
    """

    def __init__(self, num_servers: int, *, are_ours: bool) -> None:
        self._pasts = [_Past() for _ in range(num_servers)]
        self._are_ours = are_ours
        self._failures: list[ServerFailure] = []
        self._last_recovery_s: float | None = None

    @property
    def failures(self) -> Sequence[ServerFailure]:
        """Every failure so far, in order. What happens to a server until it serves again is one failure."""
        return self._failures

    @property
    def num_restarts(self) -> int:
        """New lives of all servers that were seen."""
        return sum(past.num_restarts for past in self._pasts)

    def num_restarts_of(self, index: int) -> int:
        """New lives of one server that were seen."""
        return self._pasts[index].num_restarts

    @property
    def last_recovery_s(self) -> float | None:
        """Of the last failure that is over, in seconds; None before."""
        return self._last_recovery_s

    def last_words(self, index: int) -> str:
        return self._pasts[index].last_words

    def heard(self, index: int, words: str) -> None:
        """Something was heard of a server that is not up."""
        self._pasts[index].last_words = words

    def exited(self, index: int, words: str) -> None:
        """The launcher saw its process end, and starts it again by itself."""
        past = self._pasts[index]
        past.exit_words = past.last_words = words

    def starting(self, index: int) -> None:
        """The launcher starts it again."""
        self._pasts[index].exit_words = ""

    def up(self, index: int, life: str) -> None:
        """It answers, in this life."""
        past = self._pasts[index]
        past.num_restarts += past.last_life not in ("", life)
        past.last_life, past.last_words, past.exit_words = life, "up", ""

    def serves(self, index: int) -> float | None:
        """It has the current weights. Returns the seconds since it failed, if that ends a failure."""
        past = self._pasts[index]
        past.num_lost = 0
        if past.open_failure is None:
            return None
        recovery_s = self._last_recovery_s = time.monotonic() - past.failed_at
        self._failures[past.open_failure] = replace(self._failures[past.open_failure], recovery_s=recovery_s)
        past.open_failure = None
        return recovery_s

    def lose(self, server: Server, reason: str) -> tuple[str, bool]:
        """It is taken out. Returns the reason with what the launcher has said of it, and whether somebody has to ask for its
        restart: the launcher itself restarts one whose end it saw."""
        past, now = self._pasts[server.index], time.monotonic()
        is_to_be_asked_for = not past.exit_words
        if past.exit_words:
            reason = f"{past.exit_words} ({reason})"
        past.last_words = reason
        past.num_lost += 1
        past.lost_at = now
        if past.open_failure is None:
            past.failed_at, past.open_failure = now, len(self._failures)
            self._failures.append(ServerFailure(index=server.index, name=server.name, reason=reason))
        return reason, is_to_be_asked_for

    def why_not_back(self, server: Server, life: str) -> str:
        """Why a server that was looked for and answers does not count as up; "" when it does. See the module's docstring."""
        past = self._pasts[server.index]
        if not self._are_ours:
            wait_s = return_delay_s(past.num_lost)
            if time.monotonic() - past.lost_at >= wait_s:
                return ""
            return f"it failed {past.num_lost} times without having served, so it is tried again after {wait_s:.0f} s"
        if server.state is ServerState.STARTING:  # the launcher has just started it
            is_new = life != past.last_life or not life
        else:
            is_new = bool(past.last_life and life) and life != past.last_life
        return "" if is_new else "it is still in the life that failed"
