"""Writes groups to the rollout store during the run.

    append (any thread) -> queue, bounded -> one thread: line_of -> block-N.jsonl --full--> Sealer -> block-N-M.parquet

Invariant: a line that ends in a line feed is whole, and never changes; no seq is used twice. Neither the trainer's thread nor the
event loop makes JSON or waits for the disk, but for `position` (once per checkpoint) and a queue that is full. A kill costs what
was in the queue and the line that was being written.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import logging
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.errors import RunError, message_of
from grpo_async.records import GroupStatus, RolloutGroup, ScoredGroup, TokenStats
from grpo_async.store.files import (
    METADATA,
    TEMPORARY_SUFFIX,
    Block,
    LineFile,
    Metadata,
    find_blocks,
    lock_writer,
    open_name,
    read_metadata,
    torn_bytes,
    write_metadata,
)
from grpo_async.store.lines import Entry, check_stats, line_of
from grpo_async.utils.files import Outage, Writer
from grpo_async.utils.text import count

if TYPE_CHECKING:  # the process that seals imports this package, and would take a second to load all sections
    from grpo_async.config.sections import RolloutRecordSection

logger = logging.getLogger(__name__)

_MAX_QUEUED = 64
"""Groups. They were in memory a moment ago anyway, and writing one takes milliseconds."""
_WRITE_TIMEOUT_S = 60.0
"""A write that takes longer means that the disk hangs."""
_FLUSH_TIMEOUT_S = 15.0
"""The same for `flush`, `position` (on the event loop) and `close`, which has to fit into launch.stop_timeout_s."""
_DISK_FULL_TIMEOUT_S = 10.0
"""How long a group waits while the disk is full: less than a flush, and what comes after it is queued meanwhile."""
_DISK_FULL_RETRY_S = 0.5
SEAL_TIMEOUT_S = 10.0
"""What is not sealed by then stays JSON lines, which loses nothing; the next writer seals it."""
_ALWAYS_STORED = (GroupStatus.FAILED, GroupStatus.STALE)
_SEQ = re.compile(rb'\{"schema":\d+,"seq":(\d+),')


class RolloutStore(Writer):
    """Appends groups; safe to call from several threads. One writer at a time per folder.

    Args:
        folder: the run's rollouts folder; made when it does not exist.
    """

    def __init__(self, folder: Path, *, settings: RolloutRecordSection | None = None) -> None:
        self._folder = folder
        self._settings = settings or _default_settings()
        self._changed = threading.Condition()
        self._queue: deque[Entry] = deque()
        self._is_writing = False  # an entry that is no longer in the queue
        self._next_seq: int | None = None  # None: the folder was not read yet
        self._error: RunError | None = None  # for the next call
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._has_written_all = threading.Event()  # after `close`; the thread may still wait for the sealer
        self._file: LineFile | None = None  # only the thread's
        self._outage = Outage(folder, meanwhile="rollouts wait for free space", afterward="what waited is written")
        self._metadata = Metadata()
        self._saved: Metadata | None = None
        self._sealer = Sealer(folder, self._settings.max_gb)

    def stores(self, group_id: int, status: GroupStatus) -> bool:
        """Whether a group that ends with this status is kept; `record.rollouts.sample_rate` decides by its id, so every attempt
        leaves out the same."""
        return status in _ALWAYS_STORED or random.Random(group_id).random() < self._settings.sample_rate

    def append(
        self,
        group: RolloutGroup,
        status: GroupStatus,
        step: int | None,
        *,
        scored: ScoredGroup | None = None,
        stats: Mapping[str, TokenStats] | None = None,
    ) -> None:
        """Have one group written, soon. It must not be changed anymore.

        Args:
            step: the optimizer step that used or dropped the group, None when no step saw it.
            scored: its rewards and advantages; None: it was never scored.
            stats: what the trainer found, by rollout id.

        Raises:
            RunError: an earlier group could not be written (disk full, no permission), and is lost; this one is tried all the same.
            ValueError: stats that do not fit their rollout.
        """
        stats = (stats or {}) if self._settings.token_stats else {}
        check_stats(group, stats)
        with self._changed:
            if self._is_closed:
                raise RunError(f"the rollout store {self._folder} is closed; group {group.group_id} was not written")
            self._open()
            if not self.stores(group.group_id, status):
                self._metadata.sample_rate = min(self._metadata.sample_rate, self._settings.sample_rate)
                return
            if not self._changed.wait_for(lambda: len(self._queue) < _MAX_QUEUED, timeout=_WRITE_TIMEOUT_S):
                self._metadata.num_lost += 1
                raise self._hangs(f"group {group.group_id}", _WRITE_TIMEOUT_S)
            entry = Entry(
                seq=self._open(),  # not before: others append while this waits
                group=group,
                status=status,
                step=step,
                written_at=time.time(),
                scored=scored,
                stats=stats,
            )
            self._next_seq = entry.seq + 1
            self._queue.append(entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rollout-store", daemon=True)
                self._thread.start()
            self._changed.notify_all()
            self._raise_error()

    def flush(self) -> None:
        """Wait until everything that was appended before can be read.

        Raises:
            RunError: a group could not be written, or the disk hangs.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._queue and not self._is_writing, timeout=_FLUSH_TIMEOUT_S):
                raise self._hangs(count(len(self._queue) + self._is_writing, "group"), _FLUSH_TIMEOUT_S)
            self._raise_error()

    def position(self) -> int:
        """The seq of the next group. What was appended before this call is on the disk. Raises the errors of `flush`."""
        with self._changed:
            seq = self._open()
            self.flush()
        self._save_metadata()
        return seq

    def supersede_from(self, seq: int, *, step: int) -> None:
        """A run resumes from the checkpoint of `step`: what was written from its position on is not part of the run anymore.
        Nothing is removed: `store.json` tells readers. Call it before the first `append`.

        Raises:
            RunError: it cannot be written.
        """
        with self._changed:
            until = self._next_seq = max(self._open(), seq)
            self._metadata.superseded.append({"step": step, "from_seq": seq, "until_seq": until})
            try:
                write_metadata(self._folder, self._metadata)
            except OSError as error:
                raise RunError(f"cannot write to {self._folder}: {error.strerror}; check its free space") from error

    def close(self, *, seal_wait_s: float | None = None) -> None:
        """Write what is queued, close the last block, and wait `seal_wait_s` seconds (None: `SEAL_TIMEOUT_S`) for it to be sealed;
        sealing continues in the background after that. Allowed more than once.

        Raises:
            RunError: a group could not be written, or the disk hangs.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            if not self._has_written_all.wait(timeout=_FLUSH_TIMEOUT_S):
                raise self._hangs("the rest of the groups", _FLUSH_TIMEOUT_S)
            thread.join(timeout=SEAL_TIMEOUT_S if seal_wait_s is None else seal_wait_s)
        self._save_metadata()
        with self._changed:
            self._raise_error()

    # -- with the lock

    def _open(self) -> int:
        """The next seq; reads the folder the first time."""
        if self._next_seq is None:
            self._metadata = read_metadata(self._folder)
            self._saved = copy.deepcopy(self._metadata)
            self._metadata.is_open = False
            self._next_seq = max(
                [_next_seq(find_blocks(self._folder)), *(each["until_seq"] for each in self._metadata.superseded)]
            )
        return self._next_seq

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _hangs(self, what: str, waited_s: float) -> RunError:
        return RunError(f"cannot write {what}: {self._folder} has taken nothing for {waited_s:.0f} s; check its disk")

    def _save_metadata(self, *, is_open: bool | None = None) -> None:
        """Write `store.json` if it changed."""
        with self._changed:
            if is_open is not None:
                self._metadata.is_open = is_open
            now = copy.deepcopy(self._metadata)
            if now == self._saved or (self._saved is None and now == Metadata()):
                return
            self._saved = now
        try:
            write_metadata(self._folder, now)
        except OSError as error:
            logger.warning("cannot write %s: %s", self._folder / METADATA, error)

    # -- the thread

    def _work(self) -> None:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # the first write says why
                stack.callback(os.close, lock_writer(self._folder))
            self._save_metadata(is_open=True)
            self._recover()
            self._write_all()
            self._save_metadata(is_open=False)
        self._has_written_all.set()
        self._sealer.close()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._is_closed)  # until the next group, or close
                if not self._queue:
                    break
                entry = self._queue.popleft()
                self._is_writing = True
                self._changed.notify_all()
            try:
                self._write_patiently(entry)
            except Exception as error:  # noqa: BLE001 - raised by the next call; the thread has to go on
                self._note(entry, error)
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
        self._finish_block()

    def _recover(self) -> None:
        """What an earlier writer left: cut torn lines off, and seal."""
        try:
            for path in self._folder.glob(f"*{TEMPORARY_SUFFIX}"):
                path.unlink(missing_ok=True)
            for block in find_blocks(self._folder):
                if block.is_sealed:  # a kill came before its lines were removed, perhaps
                    (self._folder / open_name(block.first_seq)).unlink(missing_ok=True)
                else:
                    self._recover_lines(block.path)
        except OSError as error:
            logger.warning("the rollout store cannot tidy up %s: %s", self._folder, error)

    def _recover_lines(self, path: Path) -> None:
        torn, size = torn_bytes(path), path.stat().st_size
        if torn:
            with self._changed:
                self._metadata.num_lost += 1
            self._save_metadata()
            logger.warning("%s: a kill had torn its last line, which is lost", path)
            os.truncate(path, size - torn)
        if size == torn:
            path.unlink()
        else:
            self._sealer.add(path)

    def _write_patiently(self, entry: Entry) -> None:
        """On a full disk it is tried again, for `_DISK_FULL_TIMEOUT_S` in all: no event says when there is space."""
        line = line_of(entry)
        while True:
            try:
                self._write(entry, line)
                self._outage.end()
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or self._outage.lasts(error) >= _DISK_FULL_TIMEOUT_S:
                    raise
            with self._changed:
                self._changed.wait(timeout=_DISK_FULL_RETRY_S)

    def _write(self, entry: Entry, line: bytes) -> None:
        if self._file is None:
            self._file = LineFile(self._folder, entry.seq)
        try:
            self._file.write(line)
        finally:
            is_empty = self._file.num_bytes == 0  # its first line failed; the next names its own block
            if is_empty or self._file.is_broken or self._file.num_bytes >= self._settings.block_mb * 1_000_000:
                self._finish_block()

    def _finish_block(self) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        try:
            file.close()
            if file.num_bytes and not file.is_broken:
                self._sealer.add(file.path)
        except OSError as error:
            logger.warning("the rollout store cannot seal %s, which loses nothing: %s", file.path, error)

    def _note(self, entry: Entry, error: Exception) -> None:
        if isinstance(error, OSError):
            failure = RunError(
                f"cannot write rollouts to {self._folder}: {error.strerror}; check its free space and permissions. "
                f"Group {entry.group.group_id} is lost"
            )
        else:
            failure = RunError(f"group {entry.group.group_id} cannot be stored: {message_of(error)}")
        failure.__cause__ = error
        logger.error("%s", failure)
        with self._changed:
            self._metadata.num_lost += 1
            self._error = self._error or failure


class Sealer:
    """The process that seals the blocks of one writer (`seal`). It dies with the thread that adds the first block
    (`utils.processes`): let that thread close it."""

    def __init__(self, folder: Path, max_gb: float) -> None:
        self._arguments = [str(os.getpid()), str(folder.absolute()), str(int(max_gb * 1e9))]
        self._child: subprocess.Popen[str] | None = None

    def add(self, path: Path) -> None:
        """Seal a block, after those that were added before. Returns at once. Raises OSError."""
        if self._child is None or self._child.poll() is not None:
            # its own process group: Ctrl-C in the terminal is for the run, which ends its child itself
            self._child = subprocess.Popen(
                [sys.executable, "-m", "grpo_async.store.seal", *self._arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                start_new_session=True,
            )
        assert self._child.stdin is not None
        self._child.stdin.write(path.name + "\n")
        self._child.stdin.flush()

    def close(self) -> None:
        """Wait until everything is sealed."""
        child, self._child = self._child, None
        if child is not None:
            assert child.stdin is not None
            with contextlib.suppress(OSError):  # it was killed
                child.stdin.close()
            child.wait()


def _default_settings() -> RolloutRecordSection:
    from grpo_async.config.sections import RolloutRecordSection

    return RolloutRecordSection()


def all_groups(settings: RolloutRecordSection) -> RolloutRecordSection:
    """The settings for the rollouts of an evaluation, of which none is left out: there are few, and each counts."""
    return settings.model_copy(update={"sample_rate": 1.0})


def _next_seq(blocks: Sequence[Block]) -> int:
    """One more than the last seq of the newest block; one more still where its last line is torn, since that had a seq too."""
    if not blocks:
        return 0
    newest = blocks[-1]
    if newest.last_seq is not None:
        return newest.last_seq + 1
    lines = newest.path.read_bytes().split(b"\n")
    found = [int(match[1]) for line in lines[:-1] if (match := _SEQ.match(line))]
    return max(found, default=newest.first_seq - 1) + 1 + bool(lines[-1])
