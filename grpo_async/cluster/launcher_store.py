"""Where the launchers of several machines meet: a torch TCPStore that node 0 opens. The ranks of the trainer meet in it, too.

    node 0   puts "run": the attempt, the versions that it computes with
    node K   claims its rank, checks that it has the same run, and posts "ready" (see rendezvous.NodeInfo) or "refused"
    node 0   posts "start" with the assignment when all are ready, and "end" with the exit code when the run is over
    all      increment a heartbeat counter at every exchange: one that stands still is dead or cut off

Between start and end they post what happens (launcher.hub, launcher.follower). The store has no password: who reaches it can end
a run. So that they can do no more than that, every value is signed with the token of the run. It lies in the run directory, which
all machines share, and never travels here: a stranger cannot learn it, nor have it sent to a server of their own.
"""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from grpo_async.errors import RunError
from grpo_async.utils.network import listening_store
from grpo_async.utils.text import clipped

if TYPE_CHECKING:
    from torch.distributed import Store

Message = Mapping[str, Any]
"""{"kind": "ready", "from": 2, ...}"""

HEARTBEAT_S = 0.5
"""Between two exchanges of a machine, which are short."""
HEARTBEAT_TIMEOUT_S = 60.0
"""After which a machine without a heartbeat is gone."""
STORE_TIMEOUT_S = 30.0
PREFIX = "launchers"
_MAX_TEXT = 20_000  # characters of one value


class ForgedError(RunError):
    """Something in the store was not signed with the token of this run."""


class LauncherStore:
    """One machine's end of the store. Its methods block for a moment only.

    Args:
        rank: of this machine among `count`.
        token: of the run.

    The methods raise RuntimeError (torch's DistError) when the store is gone: node 0's launcher has ended.
    """

    def __init__(self, store: Store, token: str, *, rank: int, count: int) -> None:
        from torch.distributed import PrefixStore

        self._store = PrefixStore(PREFIX, store)
        self._token = token
        self.rank = rank
        self._others = [other for other in range(count) if other != rank]
        self._outbox: list[tuple[int, dict[str, Any]]] = []
        self._next = 1  # number of the next message to this machine
        self._sent: dict[int, str] = {}  # key of the last message to each machine
        self._heartbeats = dict.fromkeys(self._others, 0)
        self._quiet = dict.fromkeys(self._others, 0)
        self._lock = threading.Lock()

    @classmethod
    def open(cls, address: str, port: int, token: str, *, count: int) -> LauncherStore:
        """Node 0's end, which holds the store as long as it lives.

        Raises:
            OSError: the address cannot be bound.
        """
        timeout = timedelta(seconds=STORE_TIMEOUT_S)
        store = listening_store(address, port, count, timeout, wait_for_workers=False)
        return cls(store, token, rank=0, count=count)

    def put(self, name: str, content: Mapping[str, Any]) -> None:
        """Publish a value for all machines."""
        self._store.set(name, sign(self._token, name, content))

    def claim(self) -> bool:
        """Take this machine's rank; False: another machine has it already."""
        return int(self._store.add(f"claim/{self.rank}", 1)) == 1

    def post(self, to: int, kind: str, **content: Any) -> None:
        """Have a message sent at the next exchange. Long texts are cut off."""
        short = {
            name: clipped(value, _MAX_TEXT) if isinstance(value, str) else value for name, value in content.items()
        }
        self._outbox.append((to, {"kind": kind, "from": self.rank, **short}))

    def exchange(self) -> list[Message]:
        """Send what was posted and a heartbeat, look at those of the others, and take what came.

        Raises:
            ForgedError: a message is not of this run.
        """
        with self._lock:  # a caller that gave up waiting has left its exchange running in a thread
            return self._exchange()

    def _exchange(self) -> list[Message]:
        while self._outbox:
            to, content = self._outbox.pop(0)
            key = self._sent[to] = f"to/{to}/{int(self._store.add(f'sent/{to}', 1))}"
            self._store.set(key, sign(self._token, key, content))
        self._store.add(f"heartbeat/{self.rank}", 1)
        for other in self._others:
            # only node 0 looks at everybody: the others at node 0
            if self.rank != 0 and other != 0:
                continue
            count = int(self._store.add(f"heartbeat/{other}", 0))
            self._quiet[other] = 0 if count != self._heartbeats[other] else self._quiet[other] + 1
            self._heartbeats[other] = count
        found: list[Message] = []
        while self._store.check([key := f"to/{self.rank}/{self._next}"]):
            found.append(read_signed(self._token, key, self._store.get(key)))
            self._store.delete_key(key)
            self._next += 1
        return found

    def silent(self, ranks: Sequence[int], longer_than_s: float = HEARTBEAT_TIMEOUT_S) -> list[int]:
        """Those of `ranks` that have sent no heartbeat for that long. Time is counted in exchanges, not by the clock: when a
        scheduler suspends the whole job, no machine is gone."""
        return [rank for rank in ranks if self._quiet.get(rank, 0) * HEARTBEAT_S > longer_than_s]

    def has_read(self, rank: int) -> bool:
        """Whether a machine has taken the last message to it."""
        return not self._outbox and (rank not in self._sent or not self._store.check([self._sent[rank]]))


def sign(token: str, key: str, content: Mapping[str, Any]) -> str:
    """JSON after its HMAC-SHA256 under the token, which covers the key, too: a copy elsewhere is worth nothing."""
    text = json.dumps(content)
    return f"{_mac(token, key, text)} {text}"


def read_signed(token: str, key: str, value: bytes) -> dict[str, Any]:
    """The content that `sign` was given.

    Raises:
        ForgedError: it was not signed with the token.
    """
    mac, _, text = value.decode(errors="replace").partition(" ")
    if not hmac.compare_digest(mac.encode(), _mac(token, key, text).encode()):
        raise ForgedError(f"{key} in the store of the launchers is not signed with the token of this run")
    content: dict[str, Any] = json.loads(text)
    return content


def _mac(token: str, key: str, text: str) -> str:
    return hmac.new(token.encode(), json.dumps([key, text]).encode(), "sha256").hexdigest()
