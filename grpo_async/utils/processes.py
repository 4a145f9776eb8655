"""Processes: when they end, whether one runs, a description of how one ended, and what the machine gives them."""

from __future__ import annotations

import gc
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from grpo_async.utils.kernel import PR_SET_PDEATHSIG, prctl

# ---- lifetime ----
# A process ends when its parent does, so that nothing in the tree is orphaned.
#
# Linux: the kernel delivers SIGKILL when the parent dies (PR_SET_PDEATHSIG). Elsewhere a thread watches the parent's pid.
# The signal is bound to the parent *thread*: start children from a thread that lives as long as the process.

START_VARIABLE = "GRPO_ASYNC_START"
"""Its value names this start of a child among all starts of all attempts of a run: attempt_1/server_0.restart_2.log."""
KILL_TIMEOUT_S = 10.0
"""For SIGKILL to take effect; a process that takes longer is stuck in the kernel."""

_CLOCK_S = 2.0  # the start of a process is measured in ticks of a clock that may be set


def die_with_parent(parent: int | None = None) -> None:
    """End this process as soon as its parent ends. Call it first thing in a child's main function.

    Args:
        parent: its pid, so that an end while this interpreter was starting is noticed, too. None: the child does not know the pid,
            and notices an end from now on.
    """
    parent = os.getppid() if parent is None else parent
    if sys.platform == "linux":
        prctl("parent-death signal", PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_exit_when_parent_changes, args=(parent,), name="die-with-parent", daemon=True).start()
    if os.getppid() != parent:  # it ended before this took effect
        os._exit(1)


@contextmanager
def importing_much() -> Iterator[None]:
    """Import torch, transformers and the like with the garbage collector off: it would walk through their million objects again and
    again, for a sixth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _exit_when_parent_changes(parent: int) -> None:
    while os.getppid() == parent:  # ends with the process
        time.sleep(1.0)  # macOS has no parent-death signal that Python can reach
    os._exit(1)


# ---- whether a process runs, and how it ended ----


def is_running(pid: int, started_at: float | None = None) -> bool:
    """Whether a process of this machine is there and has not ended: a zombie has.

    Args:
        started_at: seconds since 1970; a later process of the same number is another one. None: any of the number.
    """
    import psutil  # most children that import this module do without it

    try:
        process = psutil.Process(pid)
        is_it = started_at is None or abs(process.create_time() - started_at) <= _CLOCK_S
        return is_it and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:  # another user's
        return bool(psutil.pid_exists(pid))


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


# ---- what the machine gives ----

_MOST_OPEN_FILES = 1 << 20  # programs that close every number up to the limit would take seconds beyond it


def open_files_limit() -> int:
    """How many files and sockets `raise_open_files_limit` lets a process open."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return _MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_OPEN_FILES)


def raise_open_files_limit() -> None:
    """Raise the limit of this process, and of those that it starts, to what is allowed without privileges."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < (wanted := open_files_limit()):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def usable_cpus() -> int:
    """CPUs that this process may use: a scheduler or a container may give it fewer than the machine has."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def is_cpu_build(version: str) -> bool:
    """Whether a version of torch or vLLM was built for CPUs: "2.13.0+cpu"."""
    return version.partition("+")[2].startswith("cpu")
