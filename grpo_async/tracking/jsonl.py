"""metrics.jsonl: one JSON object per optimizer step, whole lines only, so a reader may look while the run writes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from grpo_async.errors import RunError
from grpo_async.utils.files import Outage, Writer, append_whole, json_safe, parse_object, write_atomically

logger = logging.getLogger(__name__)

_DISK_FULL_TIMEOUT_S = 60.0
"""How long a disk may be full: lines wait, and training continues."""


class MetricsWriter(Writer):
    """Appends to a file; after a resume, the lines of steps that will run again are dropped first."""

    def __init__(self, path: Path, *, first_step: int = 1) -> None:
        self._path = path
        self._waiting = b""
        self._outage = Outage(path, meanwhile="its lines wait, and training continues")
        if (num_kept := keep_steps(path, first_step - 1)) < first_step - 1:
            logger.warning("%s has lines of only %d of the %d steps before: it was cut", path, num_kept, first_step - 1)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line. A value that is not finite is written as null: JSON has no NaN.

        Raises:
            RunError: nothing could be written for a minute.
        """
        self._waiting += (json.dumps(json_safe({"step": step, **metrics})) + "\n").encode()
        self._write_waiting()

    def sync(self) -> None:
        """Write what waits, and flush the file to the disk."""
        self._write_waiting(flushes=True)

    def close(self) -> None:
        """Write what waits."""
        try:
            if self._waiting:
                self._write_waiting(flushes=True)
        finally:
            os.close(self._descriptor)

    def _write_waiting(self, *, flushes: bool = False) -> None:
        try:
            append_whole(self._descriptor, self._waiting)
            self._waiting = b""
            if flushes:
                os.fsync(self._descriptor)
        except OSError as error:
            failing_s = self._outage.lasts(error)
            if flushes or failing_s >= _DISK_FULL_TIMEOUT_S:
                raise RunError(
                    f"cannot write {self._path}: {error.strerror}, for {failing_s:.0f} s; free space, then go on with --resume"
                ) from error
            return
        self._outage.end()


def keep_steps(path: Path, last_step: int) -> int:
    """Drop the lines of steps after `last_step`, which a resume repeats, and what is torn or no such line. Return the number of
    lines that stay; without a file 0."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    kept = [line.decode() for line in lines if (step := _step_of(line)) is not None and step <= last_step]
    if lines:
        write_atomically(path, "".join(f"{line}\n" for line in kept))
    return len(kept)


def _step_of(line: bytes) -> int | None:
    """None: it is not such a line (a disk or an editor has damaged it)."""
    step = (parse_object(line) or {}).get("step")
    return step if isinstance(step, int) else None
