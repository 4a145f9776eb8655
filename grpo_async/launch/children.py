"""The children of the launcher: each is started in its own session by a keeper (launch.keeper), with both output streams in one
log file. When a child has ended, so has everything that descends from it.

The terminal's Ctrl-C reaches the launcher only.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

from grpo_async.errors import RunError
from grpo_async.inference.token import TOKEN_VARIABLE
from grpo_async.launch.plan import ProcessSpec
from grpo_async.launch.signals import Signals
from grpo_async.processes.assignment import ASSIGNMENT_VARIABLE
from grpo_async.utils.processes import KILL_TIMEOUT_S, START_VARIABLE, describe_exit, raise_open_files_limit
from grpo_async.utils.safe_text import tail

_FOREIGN_VARIABLES = re.compile(
    rf"{TOKEN_VARIABLE}|{ASSIGNMENT_VARIABLE}|TORCHELASTIC_.*|NNODES|((NODE|LOCAL|GROUP)_)?RANK|(LOCAL_)?WORLD_SIZE|MASTER_(ADDR|PORT)"
)
"""Variables of another launcher or torchrun, whose child this launcher is."""
_FOLDER_BYTES = 66  # with "/" and the UUID by which vLLM names a socket 103, which the kernel takes (macOS; Linux: 107)
_GRACE_S = 10.0  # between SIGTERM and SIGKILL


@contextmanager
def private_folder() -> Iterator[Path]:
    """A new folder that only this user can enter (0700), removed at the end, or by a keeper if this process is killed."""
    with tempfile.TemporaryDirectory(prefix="grpo-run-", ignore_cleanup_errors=True) as name:
        if len(os.fsencode(name)) > _FOLDER_BYTES:
            raise RunError(f"the path of the temporary folder is too long for a unix socket: {name}; set TMPDIR=/tmp")
        yield Path(name)


class Child:
    """A running child process. `Children.spawn` starts one.

    Attributes:
        exited: its exit status. Everything that descends from it has ended by then.
        url: of a server whose address is known only now.
        is_lost: it ended with the machine on which it ran.
    """

    exited: asyncio.Task[int]
    url: str | None = None
    is_lost = False

    def __init__(self, name: str, log: Path, keeper: asyncio.subprocess.Process) -> None:
        self.name = name
        self.log = log
        self.exited = asyncio.ensure_future(keeper.wait())
        self._keeper = keeper

    @property
    def is_running(self) -> bool:
        return not self.exited.done()

    @property
    def end(self) -> str:
        """How it ended. Only after `exited` is done."""
        return describe_exit(self.exited.result())

    def describe_end(self, end: str | None = None) -> str:
        lines = [f"  {line}" for line in tail(self.log)]
        last_lines = ["its last lines:", *lines] if lines else ["its log is empty"]
        return "\n".join([f"{self.name} {end or self.end}", *last_lines, f"log: {self.log}"])

    def terminate(self) -> None:
        """Send it SIGTERM, which a child passes on to its own children."""
        if self.is_running:
            self._keeper.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Kill it with all that descends from it; `exited` is done soon."""
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()


async def first_of(
    tasks: Sequence[asyncio.Future[Any]], events: Sequence[asyncio.Event], timeout_s: float | None = None
) -> None:
    """Wait for the end of a task or for an event, `timeout_s` at most."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait([*waits, *tasks], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


async def end(children: Sequence[Child], signals: Signals) -> None:
    """Send SIGTERM to each and wait for their ends; a further signal to the launcher cuts that short."""
    signals.arrived.clear()
    for child in children:
        child.terminate()
    if children:
        ended = asyncio.ensure_future(asyncio.wait([child.exited for child in children]))
        await first_of([ended], [signals.arrived], _GRACE_S)
        ended.cancel()


async def kill(children: Sequence[Child]) -> None:
    """Kill each with all that descends from it, and wait for their ends."""
    for child in children:
        child.kill()
    if running := [child.exited for child in children if child.is_running]:
        await asyncio.wait(running, timeout=2 * KILL_TIMEOUT_S)


def log_file(folder: Path, name: str, num_restarts: int) -> Path:
    """The log of a child; a restart keeps the older ones (server.log, server.restart_1.log)."""
    log = folder / name
    return log.with_name(f"{log.stem}.restart_{num_restarts}{log.suffix}") if num_restarts else log


class Children:
    """An async context manager: when it is left, everything that was started in it is killed, with all that descends from it.

    Args:
        log_folder: of this attempt.
        private_dir: the private folder, which a keeper removes if this process is killed.
        warn: gets a sentence about a process that does not end.
    """

    def __init__(self, log_folder: Path, private_dir: Path, warn: Callable[[str], None]) -> None:
        self._folder = log_folder
        self._private_dir = private_dir
        self._warn = warn
        self._all: list[Child] = []

    async def __aenter__(self) -> Self:
        raise_open_files_limit()
        return self

    async def __aexit__(self, *_: object) -> None:
        await kill(self._all)
        for child in self._all:
            if child.is_running:
                self._warn(f"processes of the {child.name} survived SIGKILL (they are stuck in the kernel)")

    async def spawn(self, spec: ProcessSpec, *, num_restarts: int = 0) -> Child:
        log = log_file(self._folder, spec.log_name, num_restarts)
        own = {name: value for name, value in os.environ.items() if not _FOREIGN_VARIABLES.fullmatch(name)}
        with log.open("wb") as output:
            keeper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "grpo_async.launch.keeper"),
                env={**own, START_VARIABLE: f"{self._folder.name}/{log.name}", **spec.environment},
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        assert keeper.stdin is not None
        keeper.stdin.write(json.dumps({"command": spec.command, "folder": str(self._private_dir)}).encode() + b"\n")
        child = Child(spec.name, log, keeper)
        self._all.append(child)
        return child
