"""The launcher's end of the control channel (processes.control)."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from grpo_async.processes.control import BYE, encode

_LINE_LIMIT = 64 * 2**20  # bytes; asyncio's default of 64 KiB is less than a long traceback
_BARRIER = "barrier"


class ControlServer:
    """An async context manager. `on_message` is called in the event loop for every message of the trainer's processes, those of
    each in order; `on_broken` gets a sentence when the channel breaks."""

    def __init__(
        self, path: Path, on_message: Callable[[Mapping[str, Any]], None], on_broken: Callable[[str], None]
    ) -> None:
        self._path = path
        self._on_message = on_message
        self._on_broken = on_broken
        self._readers: dict[asyncio.Task[None], asyncio.StreamWriter] = {}
        self._all_accepted = asyncio.Event()
        self._lines: list[bytes] = []  # all that was sent, for a trainer that connects later

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._accept, self._path, limit=_LINE_LIMIT)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for reader, writer in self._readers.items():
            reader.cancel()
            writer.transport.abort()
        await asyncio.gather(*self._readers, return_exceptions=True)

    def send(self, kind: str, **content: Any) -> None:
        """Tell the trainer, now or when it connects; see the module. "stop": finish the step, save a checkpoint and end."""
        line = encode(kind, content)
        self._lines.append(line)
        for writer in self._readers.values():
            writer.write(line)

    async def read_the_rest(self, timeout_s: float) -> None:
        """Wait until everything that ended clients have sent was handled, `timeout_s` at most. A connection of our own comes after
        those that have not even been accepted."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                _, own = await asyncio.open_unix_connection(self._path)
                own.write(encode(_BARRIER, {}))
                await self._all_accepted.wait()
                own.close()
                while self._readers:
                    await asyncio.wait(self._readers)  # timeout_s at most

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.writelines(self._lines)
        task = asyncio.create_task(self._read(reader, writer))
        self._readers[task] = writer
        task.add_done_callback(self._readers.pop)

    async def _read(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():  # until the trainer hangs up, or cancelled with the run
                message = json.loads(line)
                if message["kind"] == BYE:
                    break
                if message["kind"] == _BARRIER:
                    self._all_accepted.set()
                else:
                    self._on_message(message)
        except (
            ConnectionError,
            ValueError,
            LookupError,
            TypeError,
        ) as error:  # half a line, one over the limit, or an unknown one
            self._on_broken(f"the control channel broke: {error!r}")  # without a word the trainer would stop
        finally:
            writer.transport.abort()
