"""events.jsonl: what happened when, one line of JSON for each span that is over.

    {"name": "forward", "start": 1700000000.25, "end": 1700000000.5, "thread": "MainThread", "details": {"micro_batch": 0}}

Any thread and any coroutine of a process that has opened the file (`recording`) may record; one thread writes, about once a second.
Recording never waits and never raises. While the disk is full, the newest spans wait in memory; those that do not fit are counted
in the log. A resume goes on in the same file; a file that is full becomes `older`, in the place of the one before.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from grpo_async.utils.files import Outage, append_whole, json_safe, parse_object, whole_bytes
from grpo_async.utils.text import clipped, finite

logger = logging.getLogger(__name__)

ATTEMPT = "attempt"
"""Name of the instant with which each attempt of a run begins, and of the span that it leaves when it ends by itself."""
SHORTEST_WAIT_S = 0.001
"""Shorter waits are not worth a line: every request and every group has one."""

_INTERVAL_S = 1.0
_CLOSE_TIMEOUT_S = 5.0
_MAX_PENDING = 100_000
_BATCH = 5_000  # lines made at once, so that the text stays small
_MAX_BYTES = 128 << 20
_MAX_TEXT = 200  # of one detail: names of tools and errors may come from a model

Span = dict[str, Any]
"""One line: `name`, `start` and `end` (unix seconds, equal for an instant), `details`, and the `thread` or the `task` that it was
recorded in, if it ran in only one."""

_recorder: _Recorder | None = None


@contextmanager
def recording(path: Path) -> Iterator[None]:
    """While the block runs, the spans of this process are written to `path`."""
    global _recorder
    before, recorder = _recorder, _Recorder(path)
    _recorder = recorder
    try:
        yield
    finally:
        _recorder = before
        recorder.close()


@contextmanager
def span(name: str, **details: Any) -> Iterator[dict[str, Any]]:
    """Record the block, also if it ends by an error, whose type is then the detail `error`. Yields the details, which may be added
    to until it ends: numbers, texts, and lists of them."""
    start = time.time()
    try:
        yield details
    except BaseException as error:
        details["error"] = type(error).__name__
        raise
    finally:
        _add(name, start, time.time(), details, **_place())


def record(name: str, start: float, end: float, **details: Any) -> None:
    """Record what is over, and did not run in this thread or task alone."""
    _add(name, start, end, details)


def older(path: Path) -> Path:
    """Where the lines before those of `path` are, once it has been full."""
    return path.with_name("events.older.jsonl")


def read_spans(path: Path) -> Iterator[Span]:
    """All spans of a run in the order of their ends; what is torn or is no span is left out."""
    for each in (older(path), path):
        if each != path and not each.exists():
            continue
        with each.open("rb") as file:
            for line in file:
                content = parse_object(line) or {}
                start, end = finite(content.get("start")), finite(content.get("end"))
                if isinstance(content.get("name"), str) and None not in (start, end):
                    yield content


def _place() -> dict[str, str]:
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        task = None
    return {"thread": threading.current_thread().name} if task is None else {"task": task.get_name()}


def _add(name: str, start: float, end: float, details: dict[str, Any], **place: str) -> None:
    if _recorder is not None:
        _recorder.add({"name": name, "start": start, "end": max(start, end), **place, "details": details})


class _Recorder:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: deque[Span] = deque()
        self._num_lost = 0
        self._closing = threading.Event()
        self._descriptor: int | None = None
        self._outage = Outage(path, meanwhile="its lines wait", afterward="what memory could not hold is missing")
        self._thread = threading.Thread(target=self._write_on, name="timeline", daemon=True)
        self._thread.start()

    def add(self, span: Span) -> None:
        if len(self._pending) < _MAX_PENDING:
            self._pending.append(span)
        else:
            self._num_lost += 1

    def close(self) -> None:
        """Write what there is; takes `_CLOSE_TIMEOUT_S` at most."""
        self._closing.set()
        self._thread.join(timeout=_CLOSE_TIMEOUT_S)
        if self._thread.is_alive():
            logger.warning("the last spans were not written to %s: the disk hangs", self._path)

    def _write_on(self) -> None:
        while not self._closing.wait(timeout=_INTERVAL_S):  # close ends it, or the process
            self._write()
        self._write()
        if self._descriptor is not None:
            os.close(self._descriptor)

    def _write(self) -> None:
        if self._num_lost:
            logger.warning(
                "%s: %d spans are missing: they came faster than they are written", self._path, self._num_lost
            )
            self._num_lost = 0
        while self._pending:
            batch = [self._pending.popleft() for _ in range(min(_BATCH, len(self._pending)))]
            try:
                self._append("".join(map(_line, batch)).encode())
            except OSError as error:
                self._outage.lasts(error)
                self._pending.extendleft(reversed(batch))
                return
            self._outage.end()

    def _append(self, lines: bytes) -> None:
        if self._descriptor is None:
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
            os.ftruncate(self._descriptor, whole_bytes(self._descriptor))  # a line that a kill has torn
        size = os.fstat(self._descriptor).st_size
        if size and size + len(lines) > _MAX_BYTES:
            os.replace(self._path, older(self._path))
            os.close(self._descriptor)
            self._descriptor = None
            self._append(lines)
            return
        append_whole(self._descriptor, lines)


def _line(span: Span) -> str:
    times = {"start": round(span["start"], 6), "end": round(span["end"], 6)}
    details = {name: _detail(value) for name, value in span["details"].items()}
    return json.dumps({**span, **times, "details": details}, separators=(",", ":")) + "\n"


def _detail(value: Any) -> Any:
    """A number or a short text, or a list of them."""
    if isinstance(value, list | tuple):
        return [_detail(each) for each in value]
    if isinstance(value, float):
        return json_safe(round(value, 6))
    return value if isinstance(value, int | None) else clipped(str(value), _MAX_TEXT)
