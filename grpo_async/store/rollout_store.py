"""Writes groups to rollouts/part-N.jsonl, one JSON object per line.

Invariant: a line that ends in a line feed is whole, and is never touched again. After a kill or a full disk only the
last line of a part can be torn; a new writer, and this one after a failed write, begins a new part instead of
appending behind it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Self

from grpo_async.errors import RunError
from grpo_async.records import GroupStatus, RolloutGroup, RolloutSample, ScoredGroup
from grpo_async.store.branches import Branch, add_branch
from grpo_async.store.reader import part_number, parts
from grpo_async.store.rows import group_row, to_json

PART_BYTES = 64 * 1024 * 1024


class RolloutStore:
    """Appends groups; safe to call from several threads.

    Args:
        folder: the run's rollouts folder; made when it does not exist.
        part_bytes: a part that has reached this size is closed and the next one begun.
    """

    def __init__(self, folder: Path, *, part_bytes: int = PART_BYTES) -> None:
        self._folder = folder
        self._part_bytes = part_bytes
        self._lock = threading.Lock()
        self._file: FileIO | None = None
        self._written = 0  # bytes in the open part
        self._number = 0  # of the open part
        self._closed = False

    def append(
        self,
        group: RolloutGroup,
        samples: Sequence[RolloutSample],
        status: GroupStatus,
        step: int | None,
        *,
        scored: ScoredGroup | None = None,
    ) -> None:
        """Write one group; when this returns, readers see it.

        Args:
            samples: the trainable rows of the group, which know reward and advantage.
            step: the optimizer step that used or dropped the group, None when no step saw it.
            scored: the rewards of a group that was scored and has no samples (filtered); without it, and without
                a sample, a rollout is stored without reward.

        Raises:
            RunError: the line could not be written (disk full, no permission); nothing else is lost.
        """
        line = to_json(group_row(group, samples, status, step, scored)) + b"\n"
        with self._lock:
            if self._closed:
                raise RunError(f"the rollout store {self._folder} is closed; group {group.group_id} was not written")
            try:
                self._write(line)
            except OSError as error:
                self._close_part()
                raise RunError(
                    f"cannot write rollouts to {self._folder}: {error.strerror}; check its free space and permissions"
                ) from error

    def position(self) -> tuple[int, int]:
        """(part, bytes): where the next line goes, or later in that part. What stands before it was written before this call."""
        with self._lock:
            if self._file is not None:
                return self._number, self._written
            return self._next_number(), 0

    def supersede_from(self, position: tuple[int, int], *, step: int) -> None:
        """A run goes on from a checkpoint of `step`: what was written behind the place it had then is no part of the run any more.
        Nothing is removed: a line in branches.jsonl says so, and readers heed it. Call it before the first `append`.

        Raises:
            RunError: the line cannot be written.
        """
        with self._lock:
            until = self._next_number()
            branch = Branch(step=step, from_part=position[0], from_offset=position[1], until_part=until)
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                add_branch(self._folder, branch)
            except OSError as error:
                raise RunError(f"cannot write to {self._folder}: {error.strerror}; check its free space") from error

    def close(self) -> None:
        """Close the open part. Allowed more than once."""
        with self._lock:
            self._closed = True
            self._close_part()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self, line: bytes) -> None:
        if self._file is None:
            self._open_part()
        assert self._file is not None
        rest = memoryview(line)
        while rest:  # unbuffered: a write that fails leaves nothing behind that a later close would try again
            rest = rest[self._file.write(rest) :]
        self._written += len(line)
        if self._written >= self._part_bytes:
            self._close_part()

    def _open_part(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        number = self._number = self._next_number()
        # "x": should another writer have taken the name meanwhile, this fails instead of mixing two writers' lines
        self._file = FileIO(self._folder / f"part-{number:05d}.jsonl", "xb")
        self._written = 0

    def _next_number(self) -> int:
        return max((part_number(part) for part in parts(self._folder)), default=-1) + 1

    def _close_part(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
