"""One inference server, and the states that it goes through: what the trainer knows of it, and what the launcher does with its
process, if this run has started it.

    trainer (`fleet` makes every transition)             launcher (launcher.servers)

    STARTING                                         <-- "starting"
       | healthy                                          |
    READY                                                 |
       | weights pushed: mark_serving                --> server_serving
    SERVING                                               |
                                                     <-- "exited": the process has ended; before it ever served, the run ends
    DOWN   fenced, from any of the above: dead,      --> restart_server: it is killed with all its processes
       |   hung, a push failed                            | a wait, then it is started again: "starting"
       |-- healthy, in a new incarnation: READY           |
    GONE                                             <-- "given_up": too many restarts in a row; without another the run ends

An incarnation has an `instance_id`, random for every start of a server. A server that this run has started is back only in a new
incarnation: one that hung and wakes before it is killed must not be. One that others run is back when it answers again, but not at
once if it failed several times without having served. A server that fails is fenced: it is DOWN, gets no requests, and those that
it has go elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from grpo_async.inference.api import ServerInfo
from grpo_async.inference.control import ServerControl

ServerEvent = Literal["exited", "starting", "given_up"]
"""What the launcher tells of the process of a server."""


class ServerState(StrEnum):
    """See the module."""

    STARTING = "starting"  # has not answered yet, or was started again
    READY = "ready"  # healthy, with old weights or those of its checkpoint
    SERVING = "serving"  # has the current weights; gets requests
    DOWN = "down"  # fenced
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
    """One server at one moment, in the incarnation `instance_id` (empty while that is not known). Every change of state makes a new
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
