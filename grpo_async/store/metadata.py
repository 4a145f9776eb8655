"""store.json: what the blocks of a store cannot say themselves, because it is not in them.

Replaced as a whole by the writer, at every checkpoint and every sealed block and at the end. After a kill its counts may lack
what happened since.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from grpo_async.errors import RunError
from grpo_async.run_directory import write_atomically
from grpo_async.store.blocks import has_writer
from grpo_async.store.schema import SCHEMA
from grpo_async.utils.text import count

_NAME = "store.json"
_MAX_CHECKPOINTS = 100


@dataclass(slots=True, kw_only=True)
class StoreMetadata:
    """What a reader has to know besides the rows.

    Attributes:
        sample_rate: `record.rollouts.sample_rate` of the last writer.
        sampled_out: groups that it did not store, by status.
        sampled_out_by_seq: `sampled_out` when the group of that seq was next: a resume goes back to one of these.
        deleted_blocks: blocks that were deleted to keep to `record.rollouts.max_gb`, always the oldest.
        deleted_until: every group with a smaller seq is deleted.
        torn: names of blocks whose last line a kill had torn; that group is missing.
        lost: groups that could not be written (a full disk).
        is_open: a writer has opened the store and not closed it.
        was_killed: it is open, and the writer is gone. Found out when it is read.
    """

    schema: int = SCHEMA
    sample_rate: float = 1.0
    sampled_out: dict[str, int] = field(default_factory=dict)
    sampled_out_by_seq: dict[str, dict[str, int]] = field(default_factory=dict)
    deleted_blocks: int = 0
    deleted_until: int = 0
    torn: list[str] = field(default_factory=list)
    lost: int = 0
    is_open: bool = False
    was_killed: bool = False

    def note_checkpoint(self, seq: int) -> None:
        """A checkpoint is taken before the group `seq`: what is sampled out later may be gone back on. Also where nothing was
        sampled out yet: what is from now on must not count twice."""
        noted = {**self.sampled_out_by_seq, str(seq): dict(self.sampled_out)}
        self.sampled_out_by_seq = dict(list(noted.items())[-_MAX_CHECKPOINTS:])

    def go_back(self, seq: int) -> None:
        """A resume continues from the checkpoint that was taken before the group `seq`. One that is not noted was taken before
        anything was sampled out."""
        self.sampled_out = dict(self.sampled_out_by_seq.get(str(seq), {}))

    def notes(self) -> list[str]:
        """What a reader must know, one sentence each; empty where everything is there."""
        found = []
        if self.sampled_out:
            counts = ", ".join(f"{number} {status}" for status, number in sorted(self.sampled_out.items()))
            left_out = count(sum(self.sampled_out.values()), "group")
            found.append(f"record.rollouts.sample_rate = {self.sample_rate:g} left out {left_out} ({counts})")
        if self.deleted_blocks:
            some = (
                "the oldest block was" if self.deleted_blocks == 1 else f"the {self.deleted_blocks} oldest blocks were"
            )
            found.append(
                f"{some} deleted to keep to record.rollouts.max_gb: every group before seq {self.deleted_until}"
            )
        if self.torn:
            lines = "the last line was torn in" if len(self.torn) == 1 else "the last lines were torn in"
            found.append(f"a kill while writing: {lines} {', '.join(self.torn)}; one group is missing for each")
        if self.lost:
            found.append(f"{count(self.lost, 'group')} could not be written (see the log)")
        if self.was_killed:
            found.append("the process that wrote was killed: groups that it had not written yet are missing")
        return found


def read_metadata(folder: Path) -> StoreMetadata:
    """The metadata of a store; the default where it has none yet.

    Raises:
        RunError: the file is damaged.
    """
    path = folder / _NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {each.name for each in fields(StoreMetadata)}
        metadata = StoreMetadata(**{name: value for name, value in content.items() if name in known})
        metadata.was_killed = metadata.is_open and not has_writer(folder)
        return metadata
    except FileNotFoundError:
        return StoreMetadata()
    except (ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is damaged: {error}; remove it to read the rest") from error


class MetadataFile:
    """The metadata as the writer keeps them; safe to call from several threads. Only `load` and `save` touch the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._now = StoreMetadata()
        self._saved = _text(self._now)

    def load(self, sample_rate: float) -> None:
        """Continue from what an earlier writer noted. Raises as `read_metadata`."""
        with self._lock:
            self._now = read_metadata(self._folder)
            self._saved = _text(self._now)
            self._now.schema, self._now.sample_rate = SCHEMA, sample_rate
            self._now.is_open = self._now.was_killed = False

    @contextlib.contextmanager
    def change(self) -> Iterator[StoreMetadata]:
        """The metadata, to be changed within the block."""
        with self._lock:
            yield self._now

    def save(self) -> None:
        """Raises OSError."""
        with self._lock:
            text = _text(self._now)
            if text != self._saved:
                self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
                write_atomically(self._folder / _NAME, text, mode=0o600)
                self._saved = text


def _text(metadata: StoreMetadata) -> str:
    return json.dumps(asdict(metadata), indent=2) + "\n"
