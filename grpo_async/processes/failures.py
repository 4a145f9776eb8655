"""How the ranks of the trainer end, and which of them is the cause.

A rank that raises reports a RankFailure; torchrun's agent reports a RankExit for each rank that failed (processes.heartbeat carries
both to the launcher, which needs no disk for it). A rank that raises takes the others with it, because their collectives break: so
the earliest failure is the cause. But a rank that was killed reports nothing, and then the failures of the others are consequences.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from grpo_async.errors import message_of
from grpo_async.utils.processes import describe_exit
from grpo_async.utils.safe_text import plain

_TRACEBACK_LINES = 16
_MAX_CHARS = 8_000  # of each text: a datagram has its limit
_NOTICE_S = 5.0  # the agent notices a death within this; it kills ranks that outlive its SIGTERM only after 30 s


@dataclass(frozen=True, slots=True, kw_only=True)
class RankFailure:
    """What a rank says of its end. `time` is seconds since the epoch; `error`: see message_of."""

    rank: int
    time: float
    error: str
    traceback: str
    kind: Literal["failure"] = "failure"

    @classmethod
    def of(cls, rank: int, error: BaseException) -> RankFailure:
        """That of a rank which `error` ends now."""
        trace = "".join(traceback.format_exception(error))
        return cls(rank=rank, time=time.time(), error=message_of(error)[:_MAX_CHARS], traceback=trace[-_MAX_CHARS:])

    @property
    def is_expected(self) -> bool:
        """Raised on purpose by this package: the message says it all, the traceback stays in the log."""
        return any(line.startswith("grpo_async.") for line in self.traceback.strip().splitlines())


@dataclass(frozen=True, slots=True, kw_only=True)
class RankExit:
    """How one rank's process ended (-9: killed by signal 9); `time` is when the agent noticed, in whole seconds since the epoch."""

    rank: int
    pid: int
    time: float
    exit_code: int
    kind: Literal["exit"] = "exit"


Report = RankFailure | RankExit


class Cause(NamedTuple):
    """The rank that failed first, and a few lines for the user. Safe to print: errors quote what models and tools wrote."""

    rank: int
    text: str


def explain(reports: Sequence[Report]) -> Cause | None:
    """Which rank failed first and why; None when no rank and no agent reported anything."""
    failures = sorted((each for each in reports if isinstance(each, RankFailure)), key=lambda each: each.time)
    exits = sorted((each for each in reports if isinstance(each, RankExit)), key=lambda each: each.time)  # stable
    failure, killed = next(iter(failures), None), _killed_first(exits, {each.rank for each in failures})
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


def _killed_first(exits: Sequence[RankExit], reported: set[int]) -> RankExit | None:
    """The rank that a signal ended before it could say anything. Having seen one end, the agent ends the others by
    SIGTERM, so that signal counts for the first one only."""
    for index, each in enumerate(exits):
        is_silent = each.exit_code < 0 and each.rank not in reported
        if is_silent and (index == 0 or each.exit_code != -signal.SIGTERM):
            return each
    return None
