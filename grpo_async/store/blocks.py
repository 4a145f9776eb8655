"""The files of a store: blocks, named by the seq of their groups; what a resume left behind; who writes.

    block-000000000040.jsonl                  open: lines are appended (`LineFile`); or left by a kill
    block-000000000000-000000000039.parquet   sealed: never changes
    branches.jsonl                            which groups a resume has left behind (`AbandonedRange`)
    writer.lock                               held while a writer lives (`WriterLock`)

A line is whole as soon as its line feed is there, and never changes. Sealing writes the Parquet file under another name, renames
it, and removes the lines: a kill in between leaves both, with the same content, and the Parquet file counts."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path

from grpo_async.errors import RunError
from grpo_async.run_directory import write_atomically
from grpo_async.utils.line_files import append_whole, whole_bytes

_OPEN = re.compile(r"block-(\d{12})\.jsonl")
_SEALED = re.compile(r"block-(\d{12})-(\d{12})\.parquet")
_LISTINGS = 10

TEMPORARY_SUFFIX = ".sealing"
"""Of a Parquet file that is not whole yet."""


@dataclass(frozen=True, slots=True)
class Block:
    """One file. `last_seq` is None for one that is not sealed."""

    path: Path
    first_seq: int
    last_seq: int | None = None

    @property
    def is_sealed(self) -> bool:
        return self.last_seq is not None


def open_name(first_seq: int) -> str:
    return f"block-{first_seq:012d}.jsonl"


def sealed_name(first_seq: int, last_seq: int) -> str:
    return f"block-{first_seq:012d}-{last_seq:012d}.parquet"


def find_blocks(folder: Path) -> list[Block]:
    """The blocks of a store in the order of their groups; none where there is no folder. Of a block that is there both ways only
    the sealed one. A name may be gone when it is opened: sealed, or deleted to keep to `record.rollouts.max_gb`.

    Raises:
        RunError: the folder has the files of a development version, which cannot be read.
    """
    if not folder.is_dir():
        return []
    found: dict[int, Block] = {}
    for name in _names(folder):
        if match := _SEALED.fullmatch(name):
            found[int(match[1])] = Block(folder / name, int(match[1]), int(match[2]))
        elif match := _OPEN.fullmatch(name):
            found.setdefault(int(match[1]), Block(folder / name, int(match[1])))
    return [found[first] for first in sorted(found)]


def _names(folder: Path) -> set[str]:
    """A block that is being sealed is under one name or the other; a listing from before and after would miss both."""
    names = set(os.listdir(folder))
    for _ in range(_LISTINGS):
        again = set(os.listdir(folder))
        if again == names:
            break
        names = again
    return names


def torn_bytes(path: Path) -> int:
    """Length of the end of a file of lines that has no line feed: torn by a kill, or being written."""
    with path.open("rb") as file:
        whole = whole_bytes(file.fileno())
        return file.seek(0, 2) - whole


def size_of(path: Path) -> int:
    """Bytes of a file; 0 where it has gone."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


_ABANDONED = "branches.jsonl"


@dataclass(frozen=True, slots=True, kw_only=True)
class AbandonedRange:
    """The groups from `from_seq` up to the one before `until_seq`. `step` is that of the checkpoint."""

    step: int
    from_seq: int
    until_seq: int


def add_abandoned(folder: Path, groups: AbandonedRange) -> None:
    """Raises OSError, or as `read_abandoned`."""
    lines = (json.dumps(asdict(each)) + "\n" for each in [*read_abandoned(folder), groups])
    write_atomically(folder / _ABANDONED, "".join(lines), mode=0o600)


def read_abandoned(folder: Path) -> list[AbandonedRange]:
    """What every resume left behind, in order.

    Raises:
        RunError: a line cannot be read.
    """
    path = folder / _ABANDONED
    if not path.is_file():
        return []
    found = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            found.append(AbandonedRange(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise RunError(f"{path}:{number}: the line is damaged: {error}; remove it to read the rest") from error
    return found


_LOCK = "writer.lock"


class WriterLock:
    """Held from construction to `release`. On a file system without locks it does nothing.

    Raises:
        OSError: the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            fcntl.flock(self._descriptor, fcntl.LOCK_SH)  # a reader that looks holds it for a moment

    def release(self) -> None:
        os.close(self._descriptor)


def has_writer(folder: Path) -> bool:
    """Whether some process writes to the store now. True as well where that cannot be told."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


class LineFile:
    """One block of JSON lines.

    Args:
        first_seq: of the line that is to be the first; the file is named by it, and must not exist.

    Raises:
        OSError: it cannot be made.
    """

    def __init__(self, folder: Path, first_seq: int) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.path = folder / open_name(first_seq)
        # exclusive: should another writer have taken the name meanwhile, this fails instead of mixing two writers' lines
        self._file = FileIO(self.path, "xb", opener=lambda path, flags: os.open(path, flags | os.O_APPEND, 0o600))
        self.num_bytes = 0
        self.is_broken = False

    def write(self, line: bytes) -> None:
        """Append a line, with its line feed.

        Raises:
            OSError: it could not be written; nothing of it is left, or `is_broken` is set.
        """
        try:
            append_whole(self._file.fileno(), line)
        except OSError:
            self.is_broken = os.fstat(self._file.fileno()).st_size != self.num_bytes
            raise
        self.num_bytes += len(line)

    def close(self) -> None:
        """Close the file; one without a line is removed. Allowed more than once."""
        self._file.close()
        if self.num_bytes == 0:
            with contextlib.suppress(OSError):  # an empty block does no harm: the next writer removes it
                self.path.unlink(missing_ok=True)
