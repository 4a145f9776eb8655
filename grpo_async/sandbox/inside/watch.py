"""Waits for the code to end, and watches what the processes of the sandbox hold in memory together.

RLIMIT_AS holds each process alone. The sum is looked at 20 times a second: what a process tree can take in between is
little beside the memory of a machine, and more exact means (control groups) need rights that containers rarely give.
"""

from __future__ import annotations

import os
import signal

_LOOK_EVERY_S = 0.05
_PAGE_KB = os.sysconf("SC_PAGE_SIZE") // 1024


def wait_for(child: int, *, memory_mb: int | None, reap_others: bool) -> tuple[int, float, bool]:
    """Wait until `child` has ended; SIGCHLD must be blocked. Other children are reaped on the way if `reap_others`.

    Args:
        child: a child of this process.
        memory_mb: what all visible processes may hold together, in MiB; None = do not look.
        reap_others: this process inherits orphans (it is pid 1).

    Returns:
        Wait status, CPU seconds of the child and its reaped children, and whether the memory was exceeded.
    """
    while True:
        while True:
            pid, status, usage = os.wait4(-1 if reap_others else child, os.WNOHANG)
            if pid == child:
                return status, usage.ru_utime + usage.ru_stime, False
            if pid == 0:
                break
        if memory_mb is None:
            signal.sigwait({signal.SIGCHLD})  # the launcher kills the code after wall_s
        elif signal.sigtimedwait({signal.SIGCHLD}, _LOOK_EVERY_S) is None and _exceeds(memory_mb * 1024):
            return 0, 0.0, True


def _exceeds(limit_kb: int) -> bool:
    pids = [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]
    if sum(map(_resident_kb, pids)) <= limit_kb:
        return False
    return sum(map(_own_share_kb, pids)) > limit_kb  # a forked child shares pages with its parent


def _resident_kb(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/statm", "rb") as file:
            return int(file.read().split()[1]) * _PAGE_KB
    except OSError:
        return 0  # ended meanwhile


def _own_share_kb(pid: str) -> int:
    try:
        with open(f"/proc/{pid}/smaps_rollup", "rb") as file:
            for line in file:
                if line.startswith(b"Pss:"):
                    return int(line.split()[1])
    except OSError:
        pass  # it hid itself, or ended meanwhile
    return _resident_kb(pid)
