"""Replaces the inference server where a test wants to choose how it ends: `stand_in_server.py MODE FOLDER NAME`.

It leaves FOLDER/NAME.pid and its life's token in FOLDER/NAME.token; SIGUSR1 makes it end with status 3. Modes:

    serve             waits for a signal
    ignore-term       ... and ignores SIGTERM
    crash             says why and ends with status 3
    children          in its first life as ignore-term, with helpers that outlive it: NAME.child in its session,
                      without its environment; NAME.stray in a session of its own; NAME.bare, which has neither, but is
                      a child of the stray
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from grpo_async.utils.files import write_atomically
from tests.launch.stand_in_trainer import HELPER, leave_pid

# a helper that starts another, without any environment and in a session of its own; and leaves its pid
STRAY = f"""
import subprocess, sys
bare = subprocess.Popen([sys.executable, "-c", {HELPER!r}], env={{}}, start_new_session=True)
open(sys.argv[1] + ".tmp", "w").write(str(bare.pid))
import os; os.replace(sys.argv[1] + ".tmp", sys.argv[1])
{HELPER}
"""


def main(mode: str, folder: Path, name: str) -> int:
    is_first_life = not (folder / f"{name}.pid").exists()
    write_atomically(folder / f"{name}.token", os.environ["GRPO_ASYNC_TOKEN"])
    ends_by = {signal.SIGUSR1, signal.SIGTERM}
    if mode == "ignore-term" or (mode == "children" and is_first_life):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ends_by.remove(signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, ends_by)  # one that arrives before sigwait is kept for it
    if mode == "children" and is_first_life:
        child = subprocess.Popen([sys.executable, "-c", HELPER], env={})
        stray = subprocess.Popen(
            [sys.executable, "-c", STRAY, str(folder / f"{name}.bare.pid")], start_new_session=True
        )
        leave_pid(folder, f"{name}.child", child.pid)
        leave_pid(folder, f"{name}.stray", stray.pid)
    leave_pid(folder, name)
    if mode == "crash":
        print("\x1b[31mKV cache does not fit\x1b[0m", flush=True)
        print("giving up", flush=True)
        return 3
    print("serving", flush=True)
    if signal.sigwait(ends_by) == signal.SIGUSR1:
        print("CUDA error: the card is on fire", flush=True)
        return 3
    print("asked to end", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
