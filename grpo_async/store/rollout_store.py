"""Writes groups to the rollout store during the run.

    append (any thread) -> queue, bounded -> one thread: line_of -> block-N.jsonl --full--> child process -> block-N-M.parquet

Invariant: a line that ends in a line feed is whole, and never changes; no seq is used twice. Neither the trainer's thread nor the
event loop makes JSON or waits for the disk, but for `position` (once per checkpoint) and a queue that is full. A kill costs what
was in the queue and the line that was being written.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import random
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.errors import RunError, message_of
from grpo_async.records import GroupStatus, RolloutGroup, ScoredGroup, TokenStats
from grpo_async.store.blocks import (
    TEMPORARY_SUFFIX,
    AbandonedRange,
    Block,
    LineFile,
    WriterLock,
    add_abandoned,
    find_blocks,
    open_name,
    read_abandoned,
    torn_bytes,
)
from grpo_async.store.lines import Entry, check_stats, line_of
from grpo_async.store.metadata import MetadataFile
from grpo_async.store.sealer import Sealer
from grpo_async.utils.line_files import Outage, Writer

if TYPE_CHECKING:  # the process that seals imports this package, and would take a second to load all sections
    from grpo_async.config.record_sections import RolloutRecordSection

logger = logging.getLogger(__name__)

_MAX_QUEUED = 64
"""Groups; they are in memory anyway shortly before, and it takes milliseconds to write one."""
_WRITE_TIMEOUT_S = 60.0
"""A disk that takes nothing for this long hangs."""
_FLUSH_TIMEOUT_S = 15.0
"""The same for `flush`, `position` (on the event loop) and `close`, which has to fit into launch.stop_timeout_s."""
_ROOM_TIMEOUT_S = 10.0
"""How long a group waits for room on a full disk: less than a flush, and what comes after it is queued meanwhile."""
_ROOM_RETRY_S = 0.5
_SEAL_TIMEOUT_S = 10.0
"""What is not sealed by then stays JSON lines, which loses nothing; the next writer seals it."""
_ALWAYS_STORED = (GroupStatus.FAILED, GroupStatus.STALE)
_SEQ = re.compile(rb'\{"schema":\d+,"seq":(\d+),')


class RolloutStore(Writer):
    """Appends groups; safe to call from several threads. One writer at a time per folder.

    Args:
        folder: the run's rollouts folder; made when it does not exist.
        seals_at_close: rewrite the last block as Parquet when the store is closed, which takes about a second; without, it stays as
            JSON lines until `seal_rest`, and can be read as well.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: RolloutRecordSection | None = None,
        seals_at_close: bool = True,
    ) -> None:
        self._folder = folder
        self._settings = settings or _default_settings()
        self._seals_at_close = seals_at_close
        self._changed = threading.Condition()
        self._queue: deque[Entry] = deque()
        self._is_writing = False  # an entry that is in the queue no more
        self._next_seq: int | None = None  # None: the folder was not read yet
        self._error: RunError | None = None  # for the next call
        self._is_closed = False
        self._thread: threading.Thread | None = None
        self._file: LineFile | None = None  # only the thread's
        self._rest: Path | None = None  # the last block, where it was not sealed
        self._outage = Outage(folder, meanwhile="rollouts wait for room", afterward="what waited is written")
        self._metadata = MetadataFile(folder)
        self._sealer = Sealer(folder, self._settings, self._metadata)

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
                with self._metadata.change() as now:
                    now.sampled_out[status.value] = now.sampled_out.get(status.value, 0) + 1
                return
            if not self._changed.wait_for(lambda: len(self._queue) < _MAX_QUEUED, timeout=_WRITE_TIMEOUT_S):
                self._lose_group()
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
            self._flush()

    def position(self) -> int:
        """The seq of the next group. What was appended before this call is on the disk. Raises as `flush`."""
        with self._changed:
            seq = self._open()
            self._flush()
            with self._metadata.change() as now:
                now.note_checkpoint(seq)
        self._save_metadata()
        return seq

    def supersede_from(self, seq: int, *, step: int) -> None:
        """A run resumes from the checkpoint of `step`: what was written from its position on is not part of the run any
        more. Nothing is removed: a line in branches.jsonl says so, which readers take into account. Call it before the first
        `append`.

        Raises:
            RunError: the line cannot be written.
        """
        with self._changed:
            until = self._next_seq = max(self._open(), seq)
            try:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                add_abandoned(self._folder, AbandonedRange(step=step, from_seq=seq, until_seq=until))
                with self._metadata.change() as now:
                    now.go_back(seq)
            except OSError as error:
                raise RunError(f"cannot write to {self._folder}: {error.strerror}; check its free space") from error

    def close(self) -> None:
        """Write what is queued, and close the last block. Allowed more than once.

        Raises:
            RunError: a group could not be written, or the disk hangs.
        """
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join(timeout=_FLUSH_TIMEOUT_S)
            if thread.is_alive():
                raise self._hangs("the rest of the groups", _FLUSH_TIMEOUT_S)
            if self._seals_at_close:
                self._sealer.close(_SEAL_TIMEOUT_S)
            else:
                self._sealer.finish()
        self._save_metadata()
        with self._changed:
            self._raise_error()

    def seal_rest(self, *, wait_s: float) -> None:
        """After `close`: rewrite the last block as Parquet now, where that was left out then. Waits `wait_s` seconds at most;
        0: it continues in the background."""
        path, self._rest = self._rest, None
        if path is not None:
            self._sealer = Sealer(
                self._folder, self._settings, self._metadata
            )  # the one before has ended, or does soon
            self._sealer.add(path)
            self._sealer.finish()
        if wait_s > 0:
            self._sealer.close(wait_s)

    # -- with the lock

    def _open(self) -> int:
        """The next seq; reads the folder the first time."""
        if self._next_seq is None:
            self._metadata.load(self._settings.sample_rate)
            abandoned = read_abandoned(self._folder)
            self._next_seq = max(
                _next_seq(find_blocks(self._folder)),
                max((each.until_seq for each in abandoned), default=0),
            )
        return self._next_seq

    def _flush(self) -> None:
        def is_written() -> bool:
            return not self._queue and not self._is_writing

        if not self._changed.wait_for(is_written, timeout=_FLUSH_TIMEOUT_S):
            raise self._hangs(f"{len(self._queue) + self._is_writing} groups", _FLUSH_TIMEOUT_S)
        self._raise_error()

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _hangs(self, what: str, waited_s: float) -> RunError:
        return RunError(f"{self._folder} has taken nothing for {waited_s:.0f} s, {what} not written; check its disk")

    # -- the thread

    def _work(self) -> None:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # the first write says why
                stack.callback(WriterLock(self._folder).release)
            self._save_open(True)
            self._recover()
            self._write_all()
            self._save_open(False)

    def _save_open(self, is_open: bool) -> None:
        with self._metadata.change() as now:
            now.is_open = is_open
        self._save_metadata()

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
        self._finish_block(seals=self._seals_at_close)

    def _recover(self) -> None:
        """What an earlier writer left: cut torn lines off, after they are noted, and seal."""
        try:
            for path in self._folder.glob(f"*{TEMPORARY_SUFFIX}"):
                path.unlink(missing_ok=True)
            for block in find_blocks(self._folder):
                if block.is_sealed:  # a kill came before its lines were removed, perhaps
                    (self._folder / open_name(block.first_seq)).unlink(missing_ok=True)
                else:
                    self._recover_lines(block.path)
        except (OSError, RunError) as error:
            logger.warning("the rollout store cannot tidy up %s: %s", self._folder, error)

    def _recover_lines(self, path: Path) -> None:
        torn, size = torn_bytes(path), path.stat().st_size
        if torn:
            with self._metadata.change() as now:
                now.torn = [*(each for each in now.torn if each != path.name), path.name]
            self._metadata.save()
            logger.warning("%s: a kill had torn its last line, which is lost", path)
            os.truncate(path, size - torn)
        if size == torn:
            path.unlink()
        else:
            self._sealer.add(path)

    def _write_patiently(self, entry: Entry) -> None:
        """On a full disk it is tried again, for `_ROOM_TIMEOUT_S` in all: no event says when there is room."""
        line = line_of(entry)
        while True:
            try:
                self._write(entry, line)
                self._outage.end()
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                if self._outage.lasts(error) >= _ROOM_TIMEOUT_S:
                    raise
            with self._changed:
                self._changed.wait(timeout=_ROOM_RETRY_S)

    def _write(self, entry: Entry, line: bytes) -> None:
        if self._file is None:
            self._file = LineFile(self._folder, entry.seq)
        try:
            self._file.write(line)
        finally:
            is_empty = self._file.num_bytes == 0  # its first line failed; the next names its own block
            if is_empty or self._file.is_broken or self._file.num_bytes >= self._settings.block_mb * 1_000_000:
                self._finish_block(seals=not self._file.is_broken)

    def _finish_block(self, *, seals: bool) -> None:
        file, self._file = self._file, None
        if file is None:
            return
        file.close()
        if file.num_bytes and not file.is_broken:
            if seals:
                self._sealer.add(file.path)
            else:
                self._rest = file.path

    def _lose_group(self) -> None:
        with self._metadata.change() as now:
            now.lost += 1

    def _note(self, entry: Entry, error: Exception) -> None:
        self._lose_group()
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
            self._error = self._error or failure

    def _save_metadata(self) -> None:
        try:
            self._metadata.save()
        except OSError as error:
            logger.warning("cannot write %s: %s", self._folder / "store.json", error)


def _default_settings() -> RolloutRecordSection:
    from grpo_async.config.record_sections import RolloutRecordSection

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
