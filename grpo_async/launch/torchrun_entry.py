"""torchrun, tied to the launcher's life, that leaves word of how its ranks ended (rank_exits.json).

Run as `python -m grpo_async.launch.torchrun_entry TORCHRUN-ARGUMENTS`; exits 1 when a rank failed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from grpo_async.launch.failures import RankExit, write_rank_exits
from grpo_async.processes import die_with_launcher

ATTEMPT_VARIABLE = "GRPO_ASYNC_ATTEMPT_DIR"


def main() -> int:
    die_with_launcher()
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    try:
        run.main(sys.argv[1:])
    except ChildFailedError as error:
        print(error, file=sys.stderr)
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        exits = [
            RankExit(rank=rank, pid=failure.pid, time=failure.timestamp, exit_code=failure.exitcode)
            for rank, failure in failures
        ]
        attempt = os.environ.get(ATTEMPT_VARIABLE)
        if attempt:
            write_rank_exits(Path(attempt), exits)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
