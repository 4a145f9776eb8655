"""The children of the launcher: each is spawned into its own session, with both output streams in one log file.

The terminal's Ctrl-C therefore reaches the launcher only. A child ends itself when the launcher dies (utils.lifetime).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil

from grpo_async.errors import RunError
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.launcher.plan import ProcessSpec
from grpo_async.launcher.tree import TAG_VARIABLE, ProcessTree, adopting_orphans
from grpo_async.processes.assignment import ASSIGNMENT_VARIABLE
from grpo_async.utils.exit_status import describe_exit
from grpo_async.utils.lifetime import LAUNCHER_PID_VARIABLE
from grpo_async.utils.safe_text import tail

_OF_ANOTHER_RUN = {
    *(TOKEN_VARIABLE, ASSIGNMENT_VARIABLE),
    *(
        "NODE_RANK",
        "NNODES",
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
}


KILL_TIMEOUT_S = 10.0
"""For SIGKILL to take effect."""


class Child:
    """A running child process. Build it with `spawn`."""

    def __init__(self, spec: ProcessSpec, log: Path, process: asyncio.subprocess.Process) -> None:
        self.name = spec.name
        self.log = log
        self._process = process
        self.exited: asyncio.Task[int] = asyncio.ensure_future(process.wait())

    @classmethod
    async def spawn(cls, spec: ProcessSpec, folder: Path, *, incarnation: int = 0) -> Child:
        """Start `spec` with its log in `folder`. Call it from the main thread: the death signal is bound to it.

        Args:
            incarnation: how often it was started before; a restart keeps the older logs (server.log, server.restart_1.log).

        Raises:
            RunError: the program cannot be started.
        """
        log = folder / spec.log_name
        if incarnation > 0:
            log = log.with_name(f"{log.stem}.restart_{incarnation}{log.suffix}")
        environment = {
            **{key: value for key, value in os.environ.items() if not _is_of_another_run(key)},
            LAUNCHER_PID_VARIABLE: str(os.getpid()),
            TAG_VARIABLE: tag_of(spec),
            **spec.environment,
        }
        with log.open("wb") as output:
            try:
                process = await asyncio.create_subprocess_exec(
                    *spec.command,
                    env=environment,
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=output,
                    stderr=asyncio.subprocess.STDOUT,
                    start_new_session=True,
                )
            except OSError as error:
                raise RunError(f"cannot start the {spec.name} ({spec.command[0]}): {error}") from error
        return cls(spec, log, process)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return not self.exited.done()

    @property
    def has_ended(self) -> bool:
        """As `not is_running`, but at once: `exited` is done only when the event loop has noticed."""
        try:
            return not self.is_running or psutil.Process(self.pid).status() == psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return True

    def describe_end(self, *, how: str | None = None) -> str:
        """How it ended, and the last lines of its log. Only after `exited` is done, or with `how`."""
        how = how or describe_exit(self.exited.result())
        lines = [f"  {line}" for line in tail(self.log)]
        last_lines = ["its last lines:", *lines] if lines else ["its log is empty"]
        return "\n".join([f"{self.name} (pid {self.pid}) {how}", *last_lines, f"log: {self.log}"])

    def terminate(self) -> None:
        """SIGTERM; a child passes it on to its own children."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to its session, all at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)


class Children:
    """The children that were started inside of `ending_children`, and all that descend from them.

    Args:
        folder: for their logs.
    """

    def __init__(self, folder: Path) -> None:
        self.tree = ProcessTree()
        self.all: list[Child] = []
        self._folder = folder

    async def spawn(self, spec: ProcessSpec, *, incarnation: int = 0) -> Child:
        """See `Child.spawn`."""
        child = await Child.spawn(spec, self._folder, incarnation=incarnation)
        self.all.append(child)
        return child


@contextlib.asynccontextmanager
async def ending_children(folder: Path, warn: Callable[[str], None]) -> AsyncIterator[Children]:
    """At the end everything that was started inside is killed.

    Args:
        folder: for the logs.
        warn: gets a sentence about a process that does not end.
    """
    with adopting_orphans():
        children = Children(folder)
        try:
            yield children
        finally:
            for process in await children.tree.kill(KILL_TIMEOUT_S):
                warn(f"process {process.pid} survived SIGKILL (it is stuck in the kernel)")
            if children.all:
                await asyncio.wait([child.exited for child in children.all], timeout=KILL_TIMEOUT_S)


def tag_of(spec: ProcessSpec) -> str:
    """What the environment of this child, and of everything below it, holds as TAG_VARIABLE."""
    return f"{os.getpid()}:{spec.name}"


def _is_of_another_run(variable: str) -> bool:
    """Of another launcher or torchrun, whose child this launcher is."""
    return variable in _OF_ANOTHER_RUN or variable.startswith("TORCHELASTIC_")
