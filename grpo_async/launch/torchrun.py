"""Runs torchrun, and reports to the launcher how its ranks ended.

Run as `python -m grpo_async.launch.torchrun TORCHRUN-ARGUMENTS`; exits 1 when a rank failed.
"""

from __future__ import annotations

import os
import sys

from grpo_async.processes.assignment import Assignment
from grpo_async.processes.control import ControlClient
from grpo_async.processes.heartbeat import RankEnd
from grpo_async.utils.processes import importing_much


def main() -> int:
    with importing_much():
        from torch.distributed import run
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        control = ControlClient(Assignment.from_environment().control_socket)
        for rank, end in failures:
            RankEnd.of_status(rank, end.exitcode, end.pid, end.timestamp).report(control)
        control.close()
        return 1
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the interpreter's teardown takes a second with torch, and the launcher waits for it
