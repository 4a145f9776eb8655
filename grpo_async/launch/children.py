"""The children of the launcher and all that descends from them: each child is started in its own session, with both output streams
in one log file, and at the end everything is killed, whatever its parent is by then.

The terminal's Ctrl-C reaches the launcher only. A child ends itself when the launcher dies (utils.processes). On Linux the launcher
is the subreaper of its descendants meanwhile, so that a process whose parent died is handed to it instead of init.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

import psutil

from grpo_async.errors import RunError
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.launch.plan import ProcessSpec
from grpo_async.launch.signals import Signals
from grpo_async.processes.assignment import ASSIGNMENT_VARIABLE
from grpo_async.utils.kernel import PR_SET_CHILD_SUBREAPER, prctl
from grpo_async.utils.processes import (
    KILL_TIMEOUT_S,
    LAUNCHER_PID_VARIABLE,
    START_VARIABLE,
    TAG_VARIABLE,
    describe_exit,
    is_running,
    raise_open_files_limit,
)
from grpo_async.utils.safe_text import tail

_FOREIGN_VARIABLES = re.compile(
    rf"{TOKEN_VARIABLE}|{ASSIGNMENT_VARIABLE}|TORCHELASTIC_.*|NNODES|((NODE|LOCAL|GROUP)_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
)
"""Variables of another launcher or torchrun, whose child this launcher is."""
_ROUND_S = 0.02
_GRACE_S = 10.0  # between SIGTERM and SIGKILL


class Child:
    """A running child process. `Children.spawn` starts one.

    Attributes:
        exited: its exit status.
        url: of a server whose address is known only now.
        is_lost: it ended with the machine on which it ran.
    """

    exited: asyncio.Task[int]
    url: str | None = None
    is_lost = False

    def __init__(self, name: str, log: Path, process: asyncio.subprocess.Process, children: Children) -> None:
        self.name = name
        self.log = log
        self.pid = process.pid
        self.exited = asyncio.ensure_future(process.wait())
        self._children = children

    @property
    def is_running(self) -> bool:
        return not self.exited.done()

    @property
    def end(self) -> str:
        """How it ended. Only after `exited` is done."""
        return describe_exit(self.exited.result())

    def describe_end(self, end: str | None = None) -> str:
        """How it ended, and the last lines of its log."""
        lines = [f"  {line}" for line in tail(self.log)]
        last_lines = ["its last lines:", *lines] if lines else ["its log is empty"]
        return "\n".join([f"{self} {end or self.end}", *last_lines, f"log: {self.log}"])

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    def terminate(self) -> None:
        """Send it SIGTERM, which a child passes on to its own children."""
        if self.is_running:
            os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to its process group at once; `kill_all` finds the rest."""
        if self.is_running:
            os.killpg(self.pid, signal.SIGKILL)

    async def kill_all(self) -> None:
        """Kill it with all that descends from it."""
        await self._children.kill(self)


async def first_of(children: Sequence[Child], events: Sequence[asyncio.Event], timeout_s: float | None = None) -> None:
    """Wait for the end of a child or for an event, `timeout_s` at most."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        tasks = [*waits, *(child.exited for child in children)]
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def end(children: Sequence[Child], signals: Signals) -> None:
    """Send SIGTERM to each and wait for their ends; a further signal to the launcher cuts that short."""
    signals.arrived.clear()
    for child in children:
        child.terminate()
    if children:
        ended = asyncio.ensure_future(asyncio.wait([child.exited for child in children], timeout=_GRACE_S))
        signalled = asyncio.ensure_future(signals.arrived.wait())
        await asyncio.wait([ended, signalled], return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        signalled.cancel()


def log_file(folder: Path, name: str, num_restarts: int) -> Path:
    """The log of a child; a restart keeps the older ones (server.log, server.restart_1.log)."""
    log = folder / name
    return log.with_name(f"{log.stem}.restart_{num_restarts}{log.suffix}") if num_restarts else log


class Children:
    """An async context manager: when it is left, everything that was started in it is killed, with all that descends from it. That
    is every descendant of this process that was started since and is in another session: what else the caller runs in its own
    session is left alone. `warn` gets a sentence about a process that does not end."""

    def __init__(self, log_folder: Path, warn: Callable[[str], None]) -> None:
        self._folder = log_folder
        self._warn = warn
        self._all: list[Child] = []
        self._before = {process.pid for process in psutil.Process().children()}
        self._session = os.getsid(0)

    async def __aenter__(self) -> Self:
        raise_open_files_limit()
        _adopt_orphans(True)
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            await self.kill()
        finally:
            _adopt_orphans(False)

    async def spawn(self, spec: ProcessSpec, *, num_restarts: int = 0) -> Child:
        """Start `spec`, from a thread that lives as long as this process: the death signal is bound to it."""
        log = log_file(self._folder, spec.log_name, num_restarts)
        own = {name: value for name, value in os.environ.items() if not _FOREIGN_VARIABLES.fullmatch(name)}
        tags = {
            LAUNCHER_PID_VARIABLE: str(os.getpid()),
            TAG_VARIABLE: _tag_of(spec.name),
            START_VARIABLE: f"{self._folder.name}/{log.name}",
        }
        try:
            with log.open("wb") as output:
                process = await asyncio.create_subprocess_exec(
                    *spec.command,
                    env={**own, **tags, **spec.environment},
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
        except OSError as error:
            raise RunError(f"cannot start the {spec.name} ({spec.command[0]}): {error}") from error
        child = Child(spec.name, log, process, self)
        self._all.append(child)
        return child

    async def kill(self, child: Child | None = None) -> None:
        """Kill everything that is left, or what descends from one child, again and again until nothing is; warn of what outlives
        KILL_TIMEOUT_S. `exited` of the children is done then, or soon."""
        deadline = asyncio.get_running_loop().time() + KILL_TIMEOUT_S
        adopted: set[int] = set()
        while left := self._descendants(child):
            adopted.update(process.pid for process in left)
            for process in left:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            if asyncio.get_running_loop().time() >= deadline:
                break
            # back-off until the next round; psutil's waits would take asyncio's children from it
            await asyncio.sleep(_ROUND_S)
        _reap(adopted - {child.pid for child in self._all})  # asyncio reaps the children
        if watched := [each.exited for each in ([child] if child is not None else self._all)]:
            await asyncio.wait(watched, timeout=KILL_TIMEOUT_S)
        for process in left:
            self._warn(f"process {process.pid} survived SIGKILL (it is stuck in the kernel)")

    def _descendants(self, child: Child | None) -> list[psutil.Process]:
        """Return those that run now, parents first. Of one child: itself, its session, what carries its tag, and what these
        started, so that orphans are found, whether they left the session or dropped their environment (not both)."""
        found: list[psutil.Process] = []
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                if process.pid not in self._before and os.getsid(process.pid) != self._session:
                    found += [process, *process.children(recursive=True)]
        alive = [process for process in found if is_running(process.pid)]
        if child is None:
            return alive
        below, pids = [], {child.pid}
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess, OSError):
                is_below = process.pid in pids or process.ppid() in pids or os.getsid(process.pid) == child.pid
                if not is_below:
                    # what runs as another user cannot be killed, either
                    with contextlib.suppress(psutil.AccessDenied):
                        is_below = process.environ().get(TAG_VARIABLE) == _tag_of(child.name)
                if is_below:
                    below.append(process)
                    pids.add(process.pid)
        return below


def _adopt_orphans(enabled: bool) -> None:
    """Let orphans below this process become its children, or no longer (Linux; elsewhere nothing changes)."""
    if sys.platform == "linux":
        prctl("child subreaper", PR_SET_CHILD_SUBREAPER, enabled)


def _reap(pids: set[int]) -> None:
    """Reap adopted processes, so that they do not stay as zombies until the launcher ends."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # it runs, or has another parent
            os.waitpid(pid, os.WNOHANG)


def _tag_of(name: str) -> str:
    return f"{os.getpid()}:{name}"
