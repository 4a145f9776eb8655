"""One server as the fleet knows it: its state, and its history over several lives.

    STARTING --healthy--> READY --weights pushed: mark_serving--> SERVING
       any of them --dead, hung, a push failed: fence--> DOWN --healthy again, in a new life--> READY
                                                  '--the launcher gave it up--> GONE

A life has an `instance_id`, random for every start of a server. A server that this run has started is back only in a new life: one
that hung and wakes before it is killed must not be. One that others run is back when it answers again, but not at once if it was
lost several times without having served. (The launcher's side, which restarts processes: launcher.server_keeper.)
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from enum import StrEnum

from grpo_async.inference.control import ServerControl
from grpo_async.inference.surface import ServerInfo

_LONGEST_RETURN_DELAY_S = 60.0


class ServerState(StrEnum):
    """STARTING -> READY -> SERVING, DOWN from any of them, and back to STARTING or READY."""

    STARTING = "starting"  # not heard of yet, or started again
    READY = "ready"  # healthy, with old weights or those of its checkpoint
    SERVING = "serving"  # has the current weights; gets requests
    DOWN = "down"  # fenced: dead, hung, or failed in a push; gets nothing
    GONE = "gone"  # given up

    @property
    def is_member(self) -> bool:
        """Whether weights can be pushed to it."""
        return self in (ServerState.READY, ServerState.SERVING)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Server:
    """One server at one moment. Every change of state makes a new record, and nothing else does, so the same record means that
    nothing has happened. `since`: when it was made, by the monotonic clock."""

    index: int
    name: str
    url: str
    control: ServerControl
    state: ServerState
    since: float
    info: ServerInfo | None = None
    """As it said when it became READY; None while STARTING."""
    instance_id: str = ""
    """The life of the server that this record is of; empty while it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFailure:
    """A server that was fenced. `recovery_s`: from then until it served again; None when it does not yet."""

    index: int
    name: str
    reason: str
    at: float
    """By the monotonic clock."""
    recovery_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """`inference.heartbeat_interval_s`, `inference.heartbeat_timeout_s`, `inference.startup_timeout_s`, in seconds.
    `longest_startup_s`: of a server that is seen to work all the while."""

    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    startup_timeout_s: float
    longest_startup_s: float


@dataclass(slots=True)
class History:
    """One server over its lives. Moments are those of the monotonic clock. Nothing here is locked: `Fleet` calls it with its own
    lock held.

    Args:
        is_ours: this run has started it, and has it restarted.
    """

    is_ours: bool
    last_life: str = ""
    last_words: str = "never answered"
    """What was last heard of it."""
    failures: list[ServerFailure] = field(default_factory=list)
    """In order. What happens to a server until it serves again is one failure."""
    num_restarts: int = 0
    """New lives that were seen."""
    _exit_words: str = ""  # of the launcher, when the process has ended; it starts it again by itself
    _num_lost: int = 0  # times it was taken out since it last served
    _lost_at: float = 0.0
    _failed_at: float | None = None  # of a failure that is not over

    def exited(self, words: str) -> None:
        """The launcher saw its process end, and starts it again by itself."""
        self._exit_words = self.last_words = words

    def starting(self) -> None:
        """The launcher starts it again."""
        self._exit_words = ""

    def up(self, life: str) -> None:
        """It answers, in this life."""
        self.num_restarts += self.last_life not in ("", life)
        self.last_life, self.last_words, self._exit_words = life, "up", ""

    def serves(self) -> float | None:
        """It has the current weights. Returns the seconds since it failed, if that ends a failure."""
        self._num_lost = 0
        if self._failed_at is None:
            return None
        recovery_s = time.monotonic() - self._failed_at
        self.failures[-1] = replace(self.failures[-1], recovery_s=recovery_s)
        self._failed_at = None
        return recovery_s

    def lose(self, server: Server, reason: str) -> tuple[str, bool]:
        """It is taken out. Returns the reason with what the launcher has said of it, and whether somebody has to ask for its
        restart: the launcher itself restarts one whose end it saw."""
        is_to_be_asked_for = not self._exit_words
        if self._exit_words:
            reason = f"{self._exit_words} ({reason})"
        self.last_words = reason
        self._num_lost += 1
        self._lost_at = time.monotonic()
        if self._failed_at is None:
            self._failed_at = self._lost_at
            self.failures.append(ServerFailure(index=server.index, name=server.name, reason=reason, at=self._lost_at))
        return reason, is_to_be_asked_for

    def why_not_back(self, server: Server, life: str) -> str:
        """Why a server that was looked for and answers does not count as up; "" when it does."""
        if not self.is_ours:
            wait_s = return_delay_s(self._num_lost)
            if time.monotonic() - self._lost_at >= wait_s:
                return ""
            return f"it failed {self._num_lost} times without having served, so it is tried again after {wait_s:.0f} s"
        if server.state is ServerState.STARTING:  # the launcher has just started it
            is_new = life != self.last_life or not life
        else:
            is_new = bool(self.last_life and life) and life != self.last_life
        return "" if is_new else "it is still in the life that failed"


def return_delay_s(num_lost: int) -> float:
    """How long a server that others run is left alone: 0 after the first failure, then 2, 4, 8, ... 60 s."""
    return 0.0 if num_lost < 2 else min(_LONGEST_RETURN_DELAY_S, 2.0 ** (num_lost - 1))
