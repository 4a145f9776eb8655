"""Ends whole process trees: everything the launcher started, whoever their parents are by now.

On Linux the launcher becomes the subreaper of its descendants, so that a process whose parent died is handed to it
instead of init and is still found. Processes are ended by their pids (psutil guards against reuse), never by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator

import psutil

from grpo_async.utils.lifetime import prctl

TAG_VARIABLE = "GRPO_ASYNC_PROCESS"
"""Names, in its environment, the child of the launcher that a process descends from, whoever its parent is by now."""

_PR_SET_CHILD_SUBREAPER = 36
_ROUND_S = 0.02


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Orphans below this process become its children while the context is open (Linux; elsewhere nothing changes)."""
    if sys.platform != "linux":
        yield
        return
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0)


class ProcessTree:
    """All descendants of this process that were started after this object, in sessions other than its own.

    The supervisor starts each child in its own session, so the rule leaves out whatever else runs in the caller's.
    """

    def __init__(self) -> None:
        self._before = {process.pid for process in psutil.Process().children()}
        self._session = os.getsid(0)

    def alive(self) -> list[psutil.Process]:
        """A snapshot, parents before their children; zombies are left out (they run no more)."""
        found: list[psutil.Process] = []
        for process in psutil.Process().children():
            if process.pid in self._before or not self._is_in_another_session(process):
                continue
            found.append(process)
            with contextlib.suppress(psutil.NoSuchProcess):
                found += process.children(recursive=True)
        return [process for process in found if _is_running(process)]

    def below(self, child: int, tag: str) -> list[psutil.Process]:
        """The part of `alive` that descends from one child: its process `child`, its session, what carries its tag, and
        what these started. Orphans are found, whether they left the session or dropped their environment (not both)."""
        found: list[psutil.Process] = []
        pids: set[int] = set()
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if process.pid == child or process.ppid() in pids or _belongs(process, child, tag):
                    found.append(process)
                    pids.add(process.pid)
        return found

    async def kill(self, timeout_s: float) -> list[psutil.Process]:
        """SIGKILL everything, again and again until nothing is left; returns what outlived `timeout_s`."""
        return await self._kill(self.alive, timeout_s)

    async def kill_below(self, child: int, tag: str, timeout_s: float) -> list[psutil.Process]:
        """`kill` for one child and everything that descends from it (see `below`), also where it ended already."""
        adopted: set[int] = set()

        def find() -> list[psutil.Process]:
            found = self.below(child, tag)
            adopted.update(process.pid for process in found)
            return found

        left = await self._kill(find, timeout_s)
        _reap(adopted - {child})  # asyncio reaps the child itself
        return left

    async def _kill(self, find: Callable[[], list[psutil.Process]], timeout_s: float) -> list[psutil.Process]:
        deadline = asyncio.get_running_loop().time() + timeout_s
        while processes := find():
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if asyncio.get_running_loop().time() >= deadline:
                return processes
            # back-off until the next round; psutil's waits would take asyncio's children from it
            await asyncio.sleep(_ROUND_S)
        return []

    def _is_in_another_session(self, process: psutil.Process) -> bool:
        try:
            return os.getsid(process.pid) != self._session
        except ProcessLookupError:
            return False


def _reap(pids: Iterable[int]) -> None:
    """Take note of the end of adopted processes, so that they do not stay as zombies until the launcher ends."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # it runs, or has another parent
            os.waitpid(pid, os.WNOHANG)


def _belongs(process: psutil.Process, child: int, tag: str) -> bool:
    if os.getsid(process.pid) == child:
        return True
    try:
        return bool(process.environ().get(TAG_VARIABLE) == tag)
    except (psutil.AccessDenied, OSError):
        return False  # it changed its user: it cannot be ended either


def _is_running(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
