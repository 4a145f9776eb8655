"""A process that an event loop starts, feeds and reads, and ends together with what it started.

The process has a session of its own. When it was killed, and so could end nothing itself, the rest of the session is killed, too.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from asyncio.subprocess import PIPE, Process, SubprocessStreamProtocol
from typing import Any, Self

import psutil

CHUNK = 65536
"""Bytes to read at once."""


class ChildProcess(Process):
    """`start` it, `end` it, and `close` it at last: it has pipes for its streams."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader

    def __init__(self, transport: asyncio.SubprocessTransport, protocol: _Protocol) -> None:
        super().__init__(transport, protocol, asyncio.get_running_loop())
        self.exited = protocol.exited
        """`wait` waits for the streams, too, which an orphan may still hold."""
        self.close = transport.close
        """asyncio's own `create_subprocess_exec` leaves that to the garbage collector."""

    @classmethod
    async def start(cls, *command: str, **options: Any) -> Self:
        """Start `command` in a session of its own, with pipes.

        Args:
            options: as of subprocess.Popen.

        Raises:
            OSError: it cannot be started.
        """
        transport, protocol = await asyncio.get_running_loop().subprocess_exec(
            _Protocol, *command, stdin=PIPE, stdout=PIPE, stderr=PIPE, start_new_session=True, **options
        )
        return cls(transport, protocol)

    async def end(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL if it does not end within `timeout_s`. If it has ended by itself, nothing is sent."""
        with contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, signal.SIGTERM)  # not `terminate`, which would take its exit code away from asyncio
        try:
            async with asyncio.timeout(timeout_s):
                await self.exited.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            await self.exited.wait()  # killed
        if self.returncode == -signal.SIGKILL:
            _kill_session(self.pid)


class _Protocol(SubprocessStreamProtocol):
    def __init__(self) -> None:
        super().__init__(limit=CHUNK, loop=asyncio.get_running_loop())
        self.exited = asyncio.Event()

    def process_exited(self) -> None:
        super().process_exited()
        self.exited.set()


def _kill_session(session: int) -> None:
    """Kill what is left of a session whose leader is dead."""
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(pid) == session:
                os.kill(pid, signal.SIGKILL)
