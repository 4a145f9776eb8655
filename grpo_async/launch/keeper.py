"""Starts one command for the launcher, and leaves nothing of it behind: everything that descends from it is killed as soon as
it ends, or when the launcher closes standard input, which the kernel does for one that was killed.

    python -m grpo_async.launch.keeper        stdin: {"command": [...], "folder": "..."}, a line, kept open

SIGTERM is passed on. How the command ended, this process ends. `folder` is removed when the launcher is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from types import FrameType
from typing import Any, NoReturn

import psutil

from grpo_async.utils.kernel import PR_SET_CHILD_SUBREAPER, prctl
from grpo_async.utils.processes import KILL_TIMEOUT_S, die_with_parent

_ROUND_S = 0.02


def main(order: Any) -> NoReturn:
    launcher, own_pid = os.getppid(), os.getpid()
    if sys.platform == "linux":
        prctl("child subreaper", PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process
    process = subprocess.Popen(
        order["command"],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=lambda: die_with_parent(own_pid),
    )
    command = process.pid  # not process.terminate and the like, which would reap it

    def handle(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            _send(command, signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # of a scheduler, to everything
        signal.signal(number, handle)

    def wait_for_launcher() -> None:
        sys.stdin.buffer.read()  # a daemon thread
        _send(command, signal.SIGKILL)

    threading.Thread(target=wait_for_launcher, daemon=True).start()
    pid, status = 0, 0
    while pid != command:
        pid, status = os.wait()  # for as long as the command runs; orphans are reaped, too
    code = os.waitstatus_to_exitcode(status)
    _kill_descendants()
    if os.getppid() != launcher:
        shutil.rmtree(order["folder"], ignore_errors=True)
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-code, signal.SIG_DFL)
        os.kill(own_pid, -code)
    os._exit(code if code >= 0 else 128 - code)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _kill_descendants() -> None:
    """Kill them again and again until there are none; one that hangs in the kernel is left to it."""
    ends_at = time.monotonic() + KILL_TIMEOUT_S
    while (left := psutil.Process().children(recursive=True)) and time.monotonic() < ends_at:
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(_ROUND_S)


if __name__ == "__main__":
    main(json.loads(sys.stdin.buffer.readline()))
