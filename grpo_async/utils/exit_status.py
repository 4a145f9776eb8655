"""How a process ended, in words."""

from __future__ import annotations

import signal


def describe_exit(status: int) -> str:
    """`status` as subprocess gives it: 3 -> "ended with exit code 3", -9 -> "was killed by SIGKILL (...)"."""
    if status >= 0:
        return f"ended with exit code {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # most real-time signals have no name
        name = f"signal {-status}"
    hint = " (often the kernel, out of memory: see `dmesg`)" if -status == signal.SIGKILL else ""
    return f"was killed by {name}{hint}"
