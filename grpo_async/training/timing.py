"""The main thread's activity (Activity), and the peak memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from grpo_async.tracking.timeline import span

_MAXRSS_UNIT = 1 if sys.platform == "darwin" else 1024


class Activity:
    """What a thread is doing: shown by `str`, recorded in the timeline, and its seconds summed by kind. Only that thread
    writes it, any thread may read it.

    5 s of the kind "waiting", in the middle of which 2 s are "pushing" -> {"waiting": 3.0, "pushing": 2.0}."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._now = "starting", clock()
        self._kinds: list[str] = []  # kinds of the current blocks, the innermost last
        self._spent: dict[str, float] = {}
        self._counted_until = clock()
        self.num_begun = 0
        """Grows whenever an activity other than a push begins: pushes to servers that come and go are no progress."""

    def begin(self, what: str) -> None:
        self._now = what, self._clock()
        self.num_begun += 1

    @contextmanager
    def during(self, what: str, name: str, kind: str, **details: int) -> Iterator[None]:
        """Set the activity to `what` for this block, and record it as `name` in the timeline; afterward the previous activity is
        restored."""
        before = self._now
        self._count()
        self._now = what, self._clock()
        self.num_begun += kind != "pushing"
        self._kinds.append(kind)
        try:
            with span(name, **details):
                yield
        finally:
            self._count()
            self._kinds.pop()
            self._now = before

    def take_seconds(self) -> dict[str, float]:
        """Seconds since the last call, by kind; time outside of all blocks is left out."""
        self._count()
        spent, self._spent = self._spent, {}
        return spent

    def __str__(self) -> str:
        what, since = self._now
        return f"{what}, for {self._clock() - since:.0f} s"

    def _count(self) -> None:
        now = self._clock()
        if self._kinds:
            kind = self._kinds[-1]
            self._spent[kind] = self._spent.get(kind, 0.0) + now - self._counted_until
        self._counted_until = now


def peak_bytes(device: torch.device) -> int:
    """The peak memory of this rank so far: on a GPU, including the cache of PyTorch's allocator; on a CPU, the resident
    memory of the process, including its libraries."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_reserved(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _MAXRSS_UNIT
