"""Stands in for the inference server where a test wants to choose how it ends: `stand_in_server.py MODE FOLDER`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from grpo_async.processes import die_with_parent
from tests.launch.stand_in_trainer import leave_pid


def main(mode: str, folder: Path) -> int:
    die_with_parent()
    leave_pid(folder, "server")
    if mode == "crash":
        print("\x1b[31mKV cache does not fit\x1b[0m", flush=True)
        print("giving up", flush=True)
        return 3
    if mode == "ignore-term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pause()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
