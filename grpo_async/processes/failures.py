"""What the trainer leaves behind when it fails, in the attempt's log folder.

    failure_rank{R}.json   written by the rank that raised: {"rank", "time", "error", "traceback"}
    rank_exits.json        of the torchrun agent: [{"rank", "pid", "time", "exit_code"}], -9 = killed by signal 9;
                           rank_exits_node1.json of that of node 1, and so on

A rank that raises takes the others with it (their collectives break), so the earliest failure is the cause; but a rank
that was killed leaves no file, and then the files of the others are consequences.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from grpo_async.errors import message_of
from grpo_async.run_directory import write_atomically
from grpo_async.utils.exit_status import describe_exit
from grpo_async.utils.safe_text import plain

_TRACEBACK_LINES = 16
_NOTICE_S = 5.0  # the agent notices a death within this; it kills ranks that outlive its SIGTERM only after 30 s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """What a rank says of its end. `time` is seconds since the epoch; `error`: see message_of."""

    rank: int
    time: float
    error: str
    traceback: str

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailure:
        """That of a rank which `error` ends now."""
        trace = "".join(traceback.format_exception(error))
        return cls(rank=rank, time=time.time(), error=message_of(error), traceback=trace)

    @property
    def is_expected(self) -> bool:
        """Raised on purpose by this package: the message says it all, the traceback stays in the log."""
        lines = self.traceback.strip().splitlines()
        return any(line.startswith("grpo_async.") for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How one rank's process ended; `time` is when the agent noticed, in whole seconds since the epoch."""

    rank: int
    pid: int
    time: float
    exit_code: int


def write_failure(folder: Path, failure: RankFailure) -> None:
    """Write failure_rank{R}.json; where that is impossible (disk full) it is printed, so that the error itself is not masked."""
    path = _failure_path(folder, failure.rank)
    try:
        write_atomically(path, json.dumps(asdict(failure)))
    except OSError as problem:
        with contextlib.suppress(OSError):  # the log is on the same disk
            print(f"cannot write {path}: {problem}", file=sys.stderr)


def first_failure(folder: Path, reported: Sequence[RankFailure] = ()) -> RankFailure | None:
    """The earliest failure that a rank wrote, or reported where it could not write; None when none did."""
    written = [
        RankFailure(**json.loads(path.read_text(encoding="utf-8"))) for path in folder.glob("failure_rank*.json")
    ]
    ranks = {failure.rank for failure in written}
    failures = [*written, *(failure for failure in reported if failure.rank not in ranks)]
    return min(failures, key=lambda failure: failure.time, default=None)


def write_rank_exits(folder: Path, exits: Sequence[RankExit], *, node_rank: int = 0) -> None:
    """Write rank_exits.json of one machine, in the order in which its ranks ended."""
    name = f"rank_exits_node{node_rank}.json" if node_rank else "rank_exits.json"
    write_atomically(folder / name, json.dumps([asdict(exit_) for exit_ in exits]))


def rank_exits(folder: Path) -> list[RankExit]:
    """The ranks that failed, first one first; empty when no agent got to write them."""
    found = [
        RankExit(**entry)
        for path in sorted(folder.glob("rank_exits*.json"))
        for entry in json.loads(path.read_text(encoding="utf-8"))
    ]
    # a stable sort: each file is in order, and times are whole seconds
    return sorted(found, key=lambda exit_: exit_.time)


class Cause(NamedTuple):
    """The rank that failed first, and a few lines for the user. Safe to print: errors quote what models and tools wrote."""

    rank: int
    text: str


def explain(folder: Path, reported: Sequence[RankFailure] = ()) -> Cause | None:
    """Which rank failed first and why; None when no rank said or left anything.

    Args:
        reported: what ranks said to the launcher of their end.
    """
    failure, killed = first_failure(folder, reported), _killed_first(folder, reported)
    if killed is not None and (failure is None or failure.time > killed.time - _NOTICE_S):
        lines = [f"trainer rank {killed.rank} (pid {killed.pid}) {describe_exit(killed.exit_code)}"]
        if failure is not None:
            lines.append(f"after that rank {failure.rank} reported: {failure.error}")
        return Cause(killed.rank, plain("\n".join(lines)))
    if failure is None:
        return None
    lines = [f"trainer rank {failure.rank} failed: {failure.error}"]
    if not failure.is_expected:
        lines += ["  " + line for line in failure.traceback.rstrip().splitlines()[-_TRACEBACK_LINES:]]
    return Cause(failure.rank, plain("\n".join(lines)))


def _killed_first(folder: Path, reported: Sequence[RankFailure]) -> RankExit | None:
    """The rank that a signal ended before it could say anything. Having seen one end, the agent ends the others by
    SIGTERM, so that signal counts for the first one only."""
    ranks = {failure.rank for failure in reported}
    for index, exit_ in enumerate(rank_exits(folder)):
        silent = exit_.exit_code < 0 and exit_.rank not in ranks and not _failure_path(folder, exit_.rank).exists()
        if silent and (index == 0 or exit_.exit_code != -signal.SIGTERM):
            return exit_
    return None


def _failure_path(folder: Path, rank: int) -> Path:
    return folder / f"failure_rank{rank}.json"
