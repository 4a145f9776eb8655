"""One inference server as the fleet knows it.

    STARTING --healthy--> READY --weights pushed: mark_serving--> SERVING
       any of them --dead, hung, a push failed: fence--> DOWN --healthy again, in a new life--> READY
                                                  '--the launcher gave it up--> GONE

`fleet` makes every transition. A life has an `instance_id`, random for every start of a server. A server that this run has started
is back only in a new life: one that hung and wakes before it is killed must not be. One that others run is back when it answers
again, but not at once if it was lost several times without having served. (The launcher's side, which restarts processes:
launcher.server_keeper.)
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from grpo_async.inference.api import ServerInfo
from grpo_async.inference.control import ServerControl


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
class Endpoint:
    """A server, as far as requests need it. Two of the same index and instance are the same server."""

    index: int
    name: str
    url: str
    instance_id: str = ""
    """Which start of the server this is, random for each; sent with every request, so that no other one takes it. Empty: not
    known, any takes it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Server(Endpoint):
    """One server at one moment, in the life `instance_id` (empty while that is not known). Every change of state makes a new
    record, and nothing else does, so the same record means that nothing has happened."""

    control: ServerControl
    state: ServerState
    since: float
    """When the record was made, by the monotonic clock."""
    info: ServerInfo | None = None
    """As it said when it became READY; None while STARTING."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFailure:
    """A server that was fenced. `recovery_s`: from then until it served again; None when it does not yet."""

    index: int
    name: str
    reason: str
    at: float
    """By the monotonic clock."""
    recovery_s: float | None = None
