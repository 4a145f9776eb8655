"""The files of a store: blocks, named by the seq of their groups, and the metadata.

    block-000000000040.jsonl                  open: lines are appended; or left by a kill
    block-000000000000-000000000039.parquet   sealed: never changes
    store.json                                `Metadata`
    writer.lock                               held while a writer lives

A line is whole as soon as its line feed is there, and never changes. Sealing writes the Parquet file under another name, renames
it, and removes the lines: a kill in between leaves both, with the same content, and the Parquet file counts.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grpo_async.errors import RunError
from grpo_async.store.schema import SCHEMA
from grpo_async.utils.files import whole_bytes, write_atomically
from grpo_async.utils.text import count

_OPEN = re.compile(r"block-(\d{12})\.jsonl")
_SEALED = re.compile(r"block-(\d{12})-(\d{12})\.parquet")
METADATA = "store.json"
_LOCK = "writer.lock"

TEMPORARY_SUFFIX = ".sealing"
"""Suffix of a Parquet file that is not whole yet."""


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


def sealed_name(lines: Path, last_seq: int) -> str:
    """The name of a file of lines as soon as it is Parquet."""
    return f"{lines.stem}-{last_seq:012d}.parquet"


def find_blocks(folder: Path) -> list[Block]:
    """The blocks of a store in the order of their groups; none where there is no folder. Where a block exists in both forms, the
    sealed one is returned. A file may be gone when it is opened: sealed, or deleted to keep to `record.rollouts.max_gb`."""
    if not folder.is_dir():
        return []
    found: dict[int, Block] = {}
    for name in os.listdir(folder):
        if match := _SEALED.fullmatch(name):
            found[int(match[1])] = Block(folder / name, int(match[1]), int(match[2]))
        elif match := _OPEN.fullmatch(name):
            found.setdefault(int(match[1]), Block(folder / name, int(match[1])))
    return [found[first] for first in sorted(found)]


def whole_lines(path: Path) -> int:
    """The number of lines that have their line feed."""
    with path.open("rb") as file:
        return sum(part.count(b"\n") for part in iter(lambda: file.read(1 << 20), b""))


def torn_bytes(path: Path) -> int:
    """Length of the end of a file of lines that has no line feed: torn by a kill, or being written."""
    with path.open("rb") as file:
        whole = whole_bytes(file.fileno())
        return file.seek(0, 2) - whole


# ----------------------------------------------------------------------------------------------------- metadata


@dataclass(slots=True, kw_only=True)
class Metadata:
    """What a reader has to know besides the rows; `store.json`, which the writer replaces as a whole.

    Attributes:
        sample_rate: the lowest `record.rollouts.sample_rate` that groups were written with.
        num_lost: groups that could not be written (a full disk), or whose line a kill tore.
        superseded: what each resume left behind: {"step": of its checkpoint, "from_seq", "until_seq"}, the groups with
            from_seq <= seq < until_seq.
        is_open: a writer has opened the store and not closed it.
        first_seq: where a fork begins; its parent has the groups before.
    """

    schema: int = SCHEMA
    sample_rate: float = 1.0
    num_lost: int = 0
    superseded: list[dict[str, int]] = field(default_factory=list)
    is_open: bool = False
    first_seq: int = 0

    def superseded_condition(self) -> str:
        """An SQL condition over `seq`: the rows that a resume has superseded."""
        ranges = [f"seq >= {int(each['from_seq'])} AND seq < {int(each['until_seq'])}" for each in self.superseded]
        return f"({' OR '.join(ranges) or 'false'})"

    def notes(self, folder: Path) -> list[str]:
        """What a reader must know, one sentence each; empty where everything is there."""
        found = []
        if self.sample_rate < 1.0:
            found.append(f"record.rollouts.sample_rate = {self.sample_rate:g} left out some of the groups")
        blocks = find_blocks(folder)
        if blocks and blocks[0].first_seq > self.first_seq + self.num_lost:  # lost groups had a seq, the first ones too
            found.append(f"every group before seq {blocks[0].first_seq} was deleted to keep to record.rollouts.max_gb")
        if self.num_lost:
            found.append(f"missing: {count(self.num_lost, 'group')} that a full disk or a kill kept from being written")
        is_written = has_writer(folder)
        for block in blocks:
            if block.is_sealed or (is_written and block is blocks[-1]):
                continue
            with contextlib.suppress(FileNotFoundError):  # sealed meanwhile
                if rest := torn_bytes(block.path):
                    found.append(
                        f"the last line of {block.path.name} is torn (the writer was killed, or the disk was full): "
                        f"{rest} bytes are left out, at most one group"
                    )
        if self.is_open and not is_written:
            found.append("the process that wrote was killed: groups that it had not written yet are missing")
        return found


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a store; the default where it has none yet."""
    path = folder / METADATA
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["schema"] == SCHEMA:
            metadata = Metadata(**content)
            metadata.superseded_condition()
            return metadata
    except FileNotFoundError:
        return Metadata()
    except (ValueError, TypeError, KeyError) as error:
        raise RunError(f"{path} is damaged: {error}; remove it to read the rollouts, superseded ones too") from error
    raise RunError(
        f"{folder} has format {content['schema']} of the rollout store, this version reads format {SCHEMA}; read it with the "
        "version of grpo-async that wrote it"
    )


def write_metadata(folder: Path, metadata: Metadata) -> None:
    """Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(folder / METADATA, json.dumps(asdict(metadata), indent=2) + "\n", mode=0o600)


# --------------------------------------------------------------------------------------------------------- lock


def lock_writer(folder: Path) -> int:
    """A descriptor that holds `writer.lock` until it is closed. Raises OSError, on a file system without locks too."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)  # a reader that looks holds it for a moment
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def has_writer(folder: Path) -> bool:
    """Whether some process writes to the store now. True as well where that cannot be told."""
    try:
        descriptor = os.open(folder / _LOCK, os.O_RDONLY)
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
