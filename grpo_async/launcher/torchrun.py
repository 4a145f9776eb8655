"""Runs torchrun. It exits with the launcher, and reports to it how its ranks ended.

Run as `python -m grpo_async.launcher.torchrun TORCHRUN-ARGUMENTS`; exits 1 when a rank failed. On several machines the agents and
their ranks meet in the store that node 0's launcher has opened on one address (torchrun's own listens on all of a machine).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from grpo_async.processes.assignment import Assignment
from grpo_async.processes.heartbeat import ELASTIC_AGENT, Heartbeat, RankExit, report
from grpo_async.utils.processes import die_with_launcher

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousParameters

RENDEZVOUS_BACKEND = "grpo_async"
"""For `--rdzv-backend`, with `--rdzv-endpoint ADDRESS:PORT --rdzv-conf rank=K,timeout=SECONDS`."""


def main() -> int:
    die_with_launcher()
    assignment = Assignment.from_environment()
    Heartbeat(ELASTIC_AGENT, assignment.heartbeat_socket)
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(RENDEZVOUS_BACKEND, make_rendezvous)
    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        exits = [
            RankExit(rank=rank, pid=failure.pid, time=failure.timestamp, exit_code=failure.exitcode)
            for rank, failure in failures
        ]
        report(assignment.heartbeat_socket, *exits)
        return 1
    return 0


def make_rendezvous(parameters: RendezvousParameters) -> RendezvousHandler:
    """A rendezvous that keeps every agent at its given rank. A dynamic one would rank them by address: rank 0 might be anywhere."""
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint

    class _OneAddress(StaticTCPRendezvous):  # type: ignore[misc]
        def get_backend(self) -> str:
            return RENDEZVOUS_BACKEND

        def next_rendezvous(self) -> RendezvousInfo:
            # asked once: with --max-restarts 0 there is no second rendezvous; the handler keeps the store open
            self._store = TCPStore(
                self.master_addr, self.master_port, self.world_size, is_master=False, timeout=self.timeout
            )
            return RendezvousInfo(
                PrefixStore(self.run_id, self._store),
                self.rank,
                self.world_size,
                RendezvousStoreInfo(self.master_addr, self.master_port),
            )

    address, port = parse_rendezvous_endpoint(parameters.endpoint, -1)
    timeout_s = parameters.get_as_int("timeout")
    rank = parameters.get_as_int("rank")
    assert rank is not None
    assert timeout_s is not None
    assert parameters.max_nodes is not None
    return _OneAddress(address, port, rank, parameters.max_nodes, parameters.run_id, timeout_s)


if __name__ == "__main__":
    sys.exit(main())
