"""store.json: what the blocks of a store cannot say themselves, because it is not in them.

Replaced as a whole by the writer, at every checkpoint and every sealed block and at the end. After a kill its counts may lack
what happened since.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

from grpo_async.errors import RunError
from grpo_async.rundir import write_atomically
from grpo_async.store.schema import SCHEMA
from grpo_async.store.writer_lock import has_writer

_NAME = "store.json"
_MARKS = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreFacts:
    """What a reader has to know beside the rows.

    Attributes:
        sample_rate: `record.rollouts.sample_rate` of the last writer.
        left_out: groups that it left out, by status.
        left_out_by_seq: `left_out` when the group of that seq was next: a resume goes back to one of these.
        deleted_blocks: blocks that were deleted to keep to `record.rollouts.max_gb`, always the oldest.
        deleted_until: every group with a smaller seq is deleted.
        torn: names of blocks whose last line a kill had torn; that group is missing.
        lost: groups that could not be written (a full disk).
        is_open: a writer has begun and not closed the store.
        was_killed: it is open, and the writer is gone. Found out when it is read.
    """

    schema: int = SCHEMA
    sample_rate: float = 1.0
    left_out: Mapping[str, int] = field(default_factory=dict)
    left_out_by_seq: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    deleted_blocks: int = 0
    deleted_until: int = 0
    torn: tuple[str, ...] = ()
    lost: int = 0
    is_open: bool = False
    was_killed: bool = False

    @property
    def num_left_out(self) -> int:
        """Groups that sampling left out."""
        return sum(self.left_out.values())

    def notes(self) -> list[str]:
        """What a reader must know, one sentence each; empty where everything is there."""
        found = []
        if self.num_left_out:
            counts = ", ".join(f"{count} {status}" for status, count in sorted(self.left_out.items()))
            found.append(
                f"record.rollouts.sample_rate = {self.sample_rate:g} left out {_groups(self.num_left_out)} ({counts})"
            )
        if self.deleted_blocks:
            blocks = (
                "the oldest block was" if self.deleted_blocks == 1 else f"the {self.deleted_blocks} oldest blocks were"
            )
            found.append(
                f"{blocks} deleted to keep to record.rollouts.max_gb: every group before seq {self.deleted_until}"
            )
        if self.torn:
            lines = "the last line was torn in" if len(self.torn) == 1 else "the last lines were torn in"
            found.append(f"a kill while writing: {lines} {', '.join(self.torn)}; so many groups are missing")
        if self.lost:
            found.append(f"{_groups(self.lost)} could not be written (see the log)")
        if self.was_killed:
            found.append("the process that wrote was killed: groups that it had not written yet are missing")
        return found


def read_facts(folder: Path) -> StoreFacts:
    """The facts of a store; the default where it has none yet.

    Raises:
        RunError: the file is damaged.
    """
    path = folder / _NAME
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        known = {each.name for each in fields(StoreFacts)}
        facts = StoreFacts(**{name: value for name, value in content.items() if name in known})
        was_killed = facts.is_open and not has_writer(folder)
        return replace(facts, torn=tuple(facts.torn), was_killed=was_killed)
    except FileNotFoundError:
        return StoreFacts()
    except (ValueError, TypeError, AttributeError) as error:
        raise RunError(f"{path} is damaged: {error}; remove it to read the rest") from error


def write_facts(folder: Path, facts: StoreFacts) -> None:
    """Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    write_atomically(folder / _NAME, json.dumps(asdict(facts), indent=2) + "\n", mode=0o600)


class FactsFile:
    """The facts as the writer keeps them; safe to call from several threads. Only `load` and `save` touch the disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._saved = self._facts = StoreFacts()

    def load(self, sample_rate: float) -> None:
        """Go on from what an earlier writer noted. Raises as `read_facts`."""
        with self._lock:
            self._saved = read_facts(self._folder)
            self._facts = replace(self._saved, schema=SCHEMA, sample_rate=sample_rate, is_open=False, was_killed=False)

    def set_open(self, is_open: bool) -> None:
        """A writer begins, or has closed the store."""
        self._change(lambda facts: replace(facts, is_open=is_open))

    def left_out(self, status: str) -> None:
        """Sampling left out a group."""
        self._change(
            lambda facts: replace(facts, left_out={**facts.left_out, status: facts.left_out.get(status, 0) + 1})
        )

    def mark(self, seq: int) -> None:
        """A checkpoint is taken before the group `seq`: what is left out later may be gone back on."""

        def noted(facts: StoreFacts) -> StoreFacts:
            marks = {**facts.left_out_by_seq, str(seq): dict(facts.left_out)}
            return replace(facts, left_out_by_seq=dict(list(marks.items())[-_MARKS:]))

        self._change(noted)  # also while nothing is left out: what is left out from now on must not count twice

    def go_back(self, seq: int) -> None:
        """A resume goes on from the checkpoint that was taken before the group `seq`. Without a mark of it nothing was left out
        before: the run had no checkpoint yet."""
        self._change(lambda facts: replace(facts, left_out=dict(facts.left_out_by_seq.get(str(seq), {}))))

    def deleted(self, *, until: int) -> None:
        """The oldest block was deleted, up to the group before `until`."""
        self._change(lambda facts: replace(facts, deleted_blocks=facts.deleted_blocks + 1, deleted_until=until))

    def torn(self, name: str) -> None:
        """A kill had torn the last line of this block."""
        self._change(lambda facts: replace(facts, torn=(*(n for n in facts.torn if n != name), name)))

    def lose(self) -> None:
        """A group could not be written."""
        self._change(lambda facts: replace(facts, lost=facts.lost + 1))

    def save(self) -> None:
        """Raises OSError."""
        with self._lock:
            if self._facts != self._saved:
                write_facts(self._folder, self._facts)
                self._saved = self._facts

    def _change(self, change: Callable[[StoreFacts], StoreFacts]) -> None:
        with self._lock:
            self._facts = change(self._facts)


def _groups(number: int) -> str:
    return "one group" if number == 1 else f"{number} groups"
