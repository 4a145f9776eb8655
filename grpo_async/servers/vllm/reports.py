"""How vLLM's workers tell the API server that a long job has ended, without holding up the engine core meanwhile.

A job (joining a weight group, receiving an update) runs in a thread of each worker, so generation and heartbeats go on. Each
worker connects to a socket file of the API server as the job begins and writes one line of JSON at its end; a connection
that ends without a line is a worker that died. The file is in a folder that only this user may enter. Imports no vLLM.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from grpo_async.errors import DeadlineError, GrpoAsyncError
from grpo_async.weights.blame import NOT_ARRIVED, NOT_FORMED

_CONNECT_TIMEOUT_S = 10.0
_CAUSE_TIMEOUT_S = 2.0


class WorkerFailedError(GrpoAsyncError):
    """A worker could not do its part; the message has its own words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The end of one worker's job. `error` is "" when it worked."""

    rank: int
    error: str = ""


class WorkerReports:
    """The API server's end; see `collect_reports`. Used from one event loop."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._arrived: asyncio.Queue[Report | GrpoAsyncError] = asyncio.Queue()

    async def wait(self, num_workers: int, *, timeout_s: float, what: str, setting: str) -> None:
        """Return when `num_workers` workers have reported success.

        Raises:
            WorkerFailedError: one of them failed or died. Told at once, but one that only saw the update break off gives the
                others a moment: the cause may be among them.
            DeadlineError: not all within `timeout_s`.
            GrpoAsyncError: what `give_up` was called with.
        """
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(num_workers):
                    if failure := _failure(await self._arrived.get()):
                        raise await self._cause(failure)
        except TimeoutError:
            raise DeadlineError(what, waited_s=timeout_s, setting=setting) from None

    async def _cause(self, failure: GrpoAsyncError) -> GrpoAsyncError:
        """`failure`, or a later one that says more than that the update broke off."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CAUSE_TIMEOUT_S):
                while NOT_ARRIVED in str(failure) or NOT_FORMED in str(failure):
                    failure = _failure(await self._arrived.get()) or failure
        return failure

    def give_up(self, reason: GrpoAsyncError) -> None:
        """End `wait` with `reason`."""
        self._arrived.put_nowait(reason)

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.read()  # until `wait` ends, which closes the socket
        writer.close()
        if line:
            self._arrived.put_nowait(Report(**json.loads(line)))
        else:
            self._arrived.put_nowait(WorkerFailedError("a worker ended in the middle of it"))


def _failure(arrived: Report | GrpoAsyncError) -> GrpoAsyncError | None:
    if isinstance(arrived, GrpoAsyncError):
        return arrived
    return WorkerFailedError(f"worker {arrived.rank}: {arrived.error}") if arrived.error else None


@asynccontextmanager
async def collect_reports() -> AsyncIterator[WorkerReports]:
    """Listen for the reports of one job. Raises OSError when the socket cannot be made."""
    # mode 0700; where vLLM has its own sockets: a launcher removes that folder even if this process is killed
    folder = Path(tempfile.mkdtemp(prefix="grpo-async-", dir=os.environ.get("VLLM_RPC_BASE_PATH")))
    try:
        reports = WorkerReports(str(folder / "reports"))
        server = await asyncio.start_unix_server(reports._handle, reports.address)
        try:
            yield reports
        finally:
            server.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class Reporter:
    """A worker's end: connected from the start of the job, so that the worker's death is seen."""

    def __init__(self, address: str, *, rank: int) -> None:
        self._rank = rank
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(_CONNECT_TIMEOUT_S)
        self._socket.connect(address)  # at most _CONNECT_TIMEOUT_S

    def send(self, error: str = "") -> None:
        """Report the end of the job. Raises OSError when nobody listens any more: the job was given up."""
        with self._socket:
            self._socket.sendall(
                json.dumps({"rank": self._rank, "error": error}).encode()
            )  # at most _CONNECT_TIMEOUT_S
