"""How vLLM's workers tell the API server that a long job has ended, without holding up the engine core meanwhile.

A job (joining a weight group, receiving an update) runs in a thread of each worker, so generation and heartbeats go on. Each
worker connects to a socket file of the API server as the job begins and writes one line of JSON at its end; a connection
that ends without a line is a worker that died. The file is in a folder that only this user may enter. Imports no vLLM.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import torch

from grpo_async.errors import DeadlineError, GrpoAsyncError
from grpo_async.utils.threads import in_thread
from grpo_async.weights.calls import NOT_ARRIVED, NOT_FORMED

logger = logging.getLogger("vllm.grpo_async")

_CONNECT_TIMEOUT_S = 10.0
_CAUSE_TIMEOUT_S = 2.0


class WorkerFailedError(GrpoAsyncError):
    """A worker could not do its part; the message is the worker's own."""


class WorkerReports:
    """The API server's end; see `collect_reports`. Used from one event loop."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._ends: asyncio.Queue[GrpoAsyncError | None] = asyncio.Queue()  # of the workers' jobs; None: success
        self._connections: set[asyncio.StreamWriter] | None = set()  # None: closed

    async def wait(self, num_workers: int, *, timeout_s: float, what: str, setting: str) -> None:
        """Return when `num_workers` workers have reported success.

        Raises:
            WorkerFailedError: one of them failed or died. Raised at once; but when a worker only saw the update break off, the
                others get a moment to report: the cause may be among them.
            DeadlineError: not all within `timeout_s`.
            GrpoAsyncError: what `give_up` was called with.
        """
        try:
            async with asyncio.timeout(timeout_s):
                for _ in range(num_workers):
                    if failure := await self._ends.get():
                        raise await self._cause(failure)
        except TimeoutError as error:
            raise DeadlineError(what, waited_s=timeout_s, setting=setting) from error

    async def _cause(self, failure: GrpoAsyncError) -> GrpoAsyncError:
        """`failure`, or a later one that says more than that the update broke off."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_CAUSE_TIMEOUT_S):
                while NOT_ARRIVED in str(failure) or NOT_FORMED in str(failure):
                    failure = await self._ends.get() or failure
        return failure

    def give_up(self, reason: GrpoAsyncError) -> None:
        """End `wait` with `reason`."""
        self._ends.put_nowait(reason)

    def close(self) -> None:
        """Hang up on workers whose job still goes on: nobody waits for them any more."""
        connections, self._connections = self._connections, None
        for writer in connections or ():
            writer.transport.abort()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._connections is None:
            writer.transport.abort()
            return
        self._connections.add(writer)
        line = await reader.read()  # until the worker is done, or `close`
        writer.close()
        report = json.loads(line) if line else {"error": "a worker ended in the middle of it"}
        self._ends.put_nowait(WorkerFailedError(report["error"]) if report["error"] else None)


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
            reports.close()
            await server.wait_closed()  # every connection is closed by then, or is on its way
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_and_report(job: Callable[[], None], report_to: str, *, rank: int, device: torch.device) -> None:
    """In a worker: run `job` in a thread and report its end to the API server's socket `report_to`. Connected before this
    returns, so that the worker's death is seen.

    Raises:
        OSError: the API server does not listen.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(_CONNECT_TIMEOUT_S)
    connection.connect(report_to)  # at most _CONNECT_TIMEOUT_S

    def run() -> None:
        error = ""
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)
            job()
        except BaseException as failure:  # noqa: BLE001 - reported to the API server, which answers with it
            logger.warning("a part of a weight update failed: %s", failure)
            error = f"worker {rank}: {type(failure).__name__}: {failure}"
        try:
            with connection:
                connection.sendall(json.dumps({"error": error}).encode())  # at most _CONNECT_TIMEOUT_S
        except OSError:
            logger.warning("a part of a weight update ended, and nobody waits for it any more")

    # a daemon: one that waits for a dead trainer must not hold the process
    in_thread(run, name="weight-update")
