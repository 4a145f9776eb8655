"""Tidies up after a launcher that was killed: ends what it left running, removes its temporary folder.

The direct children of a launcher die with it (utils.processes); a daemon that user code has started does not. The
reaper is a process in its own session that waits for the end of a pipe: as long as the launcher lives, it does nothing.

    python -m grpo_async.launch.reaper LAUNCHER_PID FOLDER        stdin: "done", or its end
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil

from grpo_async.errors import RunError
from grpo_async.utils.processes import KILL_TIMEOUT_S, TAG_VARIABLE, is_running

_FOLDER_BYTES = 66  # with "/" and the UUID by which vLLM names a socket 103, which the kernel takes (macOS; Linux: 107)
_DONE = b"done\n"
_END_TIMEOUT_S = 5.0  # for the reaper to end when the launcher has


@contextlib.contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder that only this user can enter (0700), removed at the end. Should this process be killed meanwhile, the reaper
    removes it, and kills what carries the tag of this process."""
    with tempfile.TemporaryDirectory(prefix="grpo-run-", ignore_cleanup_errors=True) as name:
        if len(os.fsencode(name)) > _FOLDER_BYTES:
            raise RunError(f"the path of the temporary folder is too long for a unix socket: {name}; set TMPDIR=/tmp")
        command = (sys.executable, "-m", "grpo_async.launch.reaper", str(os.getpid()), name)
        nowhere = subprocess.DEVNULL
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=nowhere, stderr=nowhere, start_new_session=True
        )
        try:
            yield Path(name)
        finally:
            with contextlib.suppress(BrokenPipeError, subprocess.TimeoutExpired):  # it was killed
                process.communicate(_DONE, timeout=_END_TIMEOUT_S)
            process.kill()
            process.wait(_END_TIMEOUT_S)


def main(launcher: int, folder: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # of a scheduler, to everything: the launcher decides
    if sys.stdin.buffer.read() == _DONE:  # until the launcher ends, however it does
        return
    while left := _left(f"{launcher}:"):  # every round ends what it finds; what is found again has been started since
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        if len(psutil.wait_procs(left, timeout=KILL_TIMEOUT_S)[1]) == len(left):
            break  # they hang in the kernel
    shutil.rmtree(folder, ignore_errors=True)


def _left(tag: str) -> list[psutil.Process]:
    """The processes that descend from a child of the launcher, by their environment (see launch.children)."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(TAG_VARIABLE, "").startswith(tag) and is_running(process.pid):
                found.append(process)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
