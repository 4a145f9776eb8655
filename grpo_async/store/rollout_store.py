"""Writes groups to the rollout store during the run.

    append (any thread) -> queue, bounded -> one thread: line_of -> block-N.jsonl --full--> seal -> block-N-M.parquet

Invariant: a line that ends in a line feed is whole, and never changes; no seq is used twice. Neither the trainer's thread nor the
event loop makes JSON or waits for the disk, but for `position` (once per checkpoint) and a queue that is full. A kill costs what
was in the queue and the line that was being written.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import queue
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.errors import RunError, message_of
from grpo_async.records import GroupStatus, RolloutGroup, ScoredGroup, TokenStats
from grpo_async.store.files import (
    METADATA,
    TEMPORARY_SUFFIX,
    Block,
    Metadata,
    find_blocks,
    lock_writer,
    open_name,
    read_metadata,
    torn_bytes,
    write_metadata,
)
from grpo_async.store.lines import Entry, check_stats, line_of
from grpo_async.utils.files import Outage, Writer, append_whole
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
    """Appends groups; safe to call from several threads. One writer at a time per folder."""

    def __init__(self, folder: Path, *, settings: RolloutRecordSection | None = None) -> None:
        self._folder = folder
        self._settings = settings or _default_settings()
        self._lock = threading.RLock()  # of the order of writing
        self._queue: queue.Queue[Entry | None] = queue.Queue(_MAX_QUEUED)
        self._next_seq: int | None = None  # None: the folder was not read yet
        self._metadata = Metadata()
        self._errors: list[RunError] = []  # the first is for the next call
        self._is_closed = False
        self._thread: threading.Thread | None = None
        # only the thread's
        self._file: tuple[Path, int] | None = None  # the open block, and its descriptor
        self._num_bytes = 0
        self._outage = Outage(folder, meanwhile="rollouts wait for free space", afterward="what waited is written")
        self._sealer: subprocess.Popen[bytes] | None = None
        self._given: set[str] = set()  # names of blocks that a sealer has got

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
        with self._lock:
            if self._is_closed:
                raise RunError(f"the rollout store {self._folder} is closed; group {group.group_id} was not written")
            entry = Entry(
                seq=self._open(),
                group=group,
                status=status,
                step=step,
                written_at=time.time(),
                scored=scored,
                stats=stats,
            )
            if not self.stores(group.group_id, status):
                self._metadata.sample_rate = min(self._metadata.sample_rate, self._settings.sample_rate)
                return
            self._put(entry, f"group {group.group_id}", _WRITE_TIMEOUT_S)
            self._next_seq = entry.seq + 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="rollout-store", daemon=True)
                self._thread.start()
        self._raise_error()

    def flush(self) -> None:
        """Wait until everything that was appended before can be read."""
        with self._queue.all_tasks_done:
            is_done = self._queue.all_tasks_done.wait_for(
                lambda: not self._queue.unfinished_tasks, timeout=_FLUSH_TIMEOUT_S
            )
            if not is_done:
                raise self._hangs(count(self._queue.unfinished_tasks, "group"), _FLUSH_TIMEOUT_S)
        self._raise_error()

    def position(self) -> int:
        """The seq of the next group. What was appended before this call is on the disk. Raises the errors of `flush`."""
        with self._lock:
            seq = self._open()
            self.flush()
            self._save_metadata()
        return seq

    def supersede_from(self, seq: int, *, step: int) -> None:
        """A run resumes from the checkpoint of `step`: what was written from its position on is not part of the run anymore.
        Nothing is removed: `store.json` tells readers. Call it before the first `append`."""
        with self._lock:
            written = self._open()
            if written == 0:
                self._metadata.first_seq = seq
            until = self._next_seq = max(written, seq)
            self._metadata.superseded.append({"step": step, "from_seq": seq, "until_seq": until})
            try:
                write_metadata(self._folder, self._metadata)
            except OSError as error:
                raise RunError(f"cannot write to {self._folder}: {error.strerror}; check its free space") from error

    def close(self, *, seal_wait_s: float | None = None) -> None:
        """Write what is queued, close the last block, and wait `seal_wait_s` seconds (None: `SEAL_TIMEOUT_S`) for it to be sealed;
        sealing continues in the background after that. Allowed more than once."""
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
            if self._thread is None:
                return
            if is_first:
                self._put(None, "the rest of the groups", _FLUSH_TIMEOUT_S)
        try:
            self.flush()
        finally:
            self._thread.join(timeout=SEAL_TIMEOUT_S if seal_wait_s is None else seal_wait_s)

    # -- with the lock

    def _open(self) -> int:
        """The next seq; reads the folder the first time."""
        if self._next_seq is None:
            self._metadata = read_metadata(self._folder)
            self._metadata.is_open = False
            superseded = [each["until_seq"] for each in self._metadata.superseded]
            self._next_seq = max([_next_seq(find_blocks(self._folder)), *superseded])
        return self._next_seq

    def _put(self, entry: Entry | None, what: str, timeout_s: float) -> None:
        try:
            self._queue.put(entry, timeout=timeout_s)
        except queue.Full:
            self._metadata.num_lost += 1
            raise self._hangs(what, timeout_s) from None

    def _raise_error(self) -> None:
        if self._errors:
            error = self._errors[0]
            self._errors.clear()
            raise error

    def _hangs(self, what: str, waited_s: float) -> RunError:
        return RunError(f"cannot write {what}: {self._folder} has taken nothing for {waited_s:.0f} s; check its disk")

    def _save_metadata(self) -> None:
        try:
            write_metadata(self._folder, self._metadata)
        except OSError as error:
            logger.warning("cannot write %s: %s", self._folder / METADATA, error)

    # -- the thread

    def _work(self) -> None:
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # the first write says why
                stack.callback(os.close, lock_writer(self._folder))
            self._metadata.is_open = True
            self._save_metadata()
            self._recover()
            while (entry := self._queue.get()) is not None:  # until the next group, or close
                try:
                    self._write_patiently(entry)
                except Exception as error:  # noqa: BLE001 - raised by the next call; the thread has to go on
                    self._note(entry, error)
                self._queue.task_done()
            self._finish_block()
            self._metadata.is_open = False
            self._save_metadata()
        self._queue.task_done()
        self._wait_for_sealer()
        self._seal()  # what became full meanwhile
        self._wait_for_sealer()

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
        self._seal()

    def _recover_lines(self, path: Path) -> None:
        torn, size = torn_bytes(path), path.stat().st_size
        if torn:
            self._metadata.num_lost += 1
            self._save_metadata()
            logger.warning("%s: a kill had torn its last line, which is lost", path)
            os.truncate(path, size - torn)
        if size == torn:
            path.unlink()

    def _write_patiently(self, entry: Entry) -> None:
        """On a full disk it is tried again, for `_DISK_FULL_TIMEOUT_S` in all: no event says when there is space."""
        line = line_of(entry)
        while True:
            try:
                self._write(entry.seq, line)
                self._outage.end()
                return
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT) or self._outage.lasts(error) >= _DISK_FULL_TIMEOUT_S:
                    raise
            time.sleep(_DISK_FULL_RETRY_S)

    def _write(self, seq: int, line: bytes) -> None:
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            path, self._num_bytes = self._folder / open_name(seq), 0
            # O_EXCL: should another writer have taken the name, this fails instead of mixing the lines of two
            self._file = path, os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
        descriptor = self._file[1]
        try:
            append_whole(descriptor, line)
            self._num_bytes += len(line)
        finally:
            is_torn = os.fstat(descriptor).st_size != self._num_bytes  # and could not be cut back
            if is_torn or self._num_bytes >= self._settings.block_mb * 1_000_000:
                self._finish_block()

    def _finish_block(self) -> None:
        if self._file is None:
            return
        (path, descriptor), self._file = self._file, None
        os.close(descriptor)
        if self._num_bytes == 0:
            path.unlink(missing_ok=True)
        self._seal()

    def _seal(self) -> None:
        """Start a process that seals the full blocks, unless one is at work. It dies with this thread (`utils.processes`)."""
        if self._sealer is not None and self._sealer.poll() is None:
            return
        try:
            lines = [block.path for block in find_blocks(self._folder) if not block.is_sealed]
            open_path = None if self._file is None else self._file[0]
            if names := [path.name for path in lines if path != open_path and path.name not in self._given]:
                self._given.update(names)
                limits = [str(os.getpid()), str(self._folder.absolute()), str(int(self._settings.max_gb * 1e9))]
                # its own process group: Ctrl-C in the terminal is for the run, which ends its child itself
                self._sealer = subprocess.Popen(
                    [sys.executable, "-m", "grpo_async.store.seal", *limits, *names],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                )
        except OSError as error:
            logger.warning("the rollout store cannot seal what is in %s, which loses nothing: %s", self._folder, error)

    def _wait_for_sealer(self) -> None:
        if self._sealer is not None:
            self._sealer.wait()

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
        self._metadata.num_lost += 1
        self._errors.append(failure)


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
