"""events.jsonl: one line for each event.

    {"name": "forward", "track": "trainer", "start": 1700000000.25, "end": 1700000000.5, "details": {"rows": 4}}

Invariants: a line that ends in a line feed is whole: a write that breaks off is taken back, and a line that a kill has torn is cut
off by the next attempt, which continues in the same file. A file that has reached its largest size loses its older half by one
rename, and the new first line says so.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_async.utils.files import Outage, append_whole, json_safe, parse_object, replacing, whole_bytes
from grpo_async.utils.text import clipped

logger = logging.getLogger(__name__)

DROPPED = "older events dropped"
"""Name of the first line of a file whose older half was dropped."""
LOST = "events lost"
"""Name of an instant; details: `events` that could not be written, or that came faster than they are written."""
ATTEMPT = "attempt"
"""Name of the instant with which each attempt of a run begins, and of the span that it leaves when it ends by itself."""

_MAX_TEXT = 200  # of one detail: names of tools and errors may come from a model
_COPY_BYTES = 1 << 20
_DISK_FULL_RETRY_S = 60.0  # after the older half could not be dropped: a try writes half the file


@dataclass(frozen=True, slots=True)
class Event:
    """One line. `start` and `end` are unix seconds, equal for an instant."""

    name: str
    track: str
    start: float
    end: float
    details: dict[str, Any] = field(default_factory=dict)

    @property
    def duration_s(self) -> float:
        return self.end - self.start


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file in the order in which they ended. A torn last line is left out, and so is a line that is not an event.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        for line in file:
            event = parse_event(line)
            if event is not None:
                yield event


def parse_event(line: bytes) -> Event | None:
    """None for a torn line and for what is not an event."""
    content = parse_object(line) if line.endswith(b"\n") else None
    if content is None:
        return None
    try:
        event = Event(
            str(content["name"]),
            str(content["track"]),
            float(content["start"]),
            float(content["end"]),
            content["details"],
        )
    except (ValueError, KeyError, TypeError, OverflowError):  # a number of hundreds of digits
        return None
    # JSON may hold NaN and Infinity as Python reads it, and a comparison with NaN is false
    is_sound = 0.0 <= event.start <= event.end < 1e12 and isinstance(event.details, dict)
    return event if is_sound else None


def event_line(event: Event) -> str:
    """The line of an event, with its line feed. Long texts are cut; what JSON cannot hold becomes text."""
    content = {
        "name": event.name,
        "track": event.track,
        "start": round(event.start, 6),
        "end": round(event.end, 6),
        "details": {name: _detail(value) for name, value in event.details.items()},
    }
    return json.dumps(content, separators=(",", ":")) + "\n"


def _detail(value: Any) -> Any:
    if isinstance(value, str):
        return clipped(value, _MAX_TEXT)
    if isinstance(value, list | tuple):
        return [_detail(each) for each in value]
    if isinstance(value, float):
        return json_safe(round(value, 6))
    return value if isinstance(value, int | None) else _detail(str(value))


class EventWriter:
    """Writes the file. One thread uses it."""

    def __init__(self, path: Path, *, max_bytes: int) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self._descriptor: int | None = None
        self._size = 0
        self._outage = Outage(
            path, meanwhile="the run continues without it", afterward="events that are lost are counted in it"
        )
        self._drops_from = 0.0  # not before; by time.monotonic()

    def append(self, text: str) -> bool:
        """Write whole lines, all or none. Returns whether they were written."""
        data = text.encode()
        try:
            if self._descriptor is None:
                self._open()
            if self._size + len(data) > self._max_bytes:
                if time.monotonic() < self._drops_from:
                    return False
                self._drop_older_half()
            assert self._descriptor is not None
            append_whole(self._descriptor, data)
            self._size += len(data)
        except OSError as error:
            self.close()
            self._outage.lasts(error)
            return False
        self._outage.end()
        return True

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self) -> None:
        self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        self._size = whole_bytes(self._descriptor)
        os.ftruncate(self._descriptor, self._size)  # a line that a kill has torn

    def _drop_older_half(self) -> None:
        """Rewrite the file with its newer half."""
        try:
            with replacing(self.path) as temporary:
                self._copy_newer_half(temporary)
        except OSError:
            self._drops_from = time.monotonic() + _DISK_FULL_RETRY_S
            raise
        self.close()
        self._open()
        logger.info("the older half of %s was dropped to keep it small", self.path)

    def _copy_newer_half(self, temporary: Path) -> None:
        with self.path.open("rb") as source, temporary.open("wb") as target:
            source.seek(max(0, self._size // 2 - 1))
            source.readline()
            cut = source.tell()  # the first line that stays
            kept = parse_event(source.readline())
            since = time.time() if kept is None else kept.start
            target.write(event_line(Event(DROPPED, "run", since, since)).encode())
            source.seek(cut)
            while chunk := source.read(_COPY_BYTES):
                target.write(chunk)
