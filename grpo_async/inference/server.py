"""What the fleet knows of one server."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from grpo_async.inference.control import ServerControl
from grpo_async.inference.surface import ServerInfo


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
    recovery_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """`inference.heartbeat_interval_s`, `inference.heartbeat_timeout_s`, `inference.startup_timeout_s`, in seconds.
    `longest_startup_s`: of a server that is seen to work all the while."""

    heartbeat_interval_s: float
    heartbeat_timeout_s: float
    startup_timeout_s: float
    longest_startup_s: float
