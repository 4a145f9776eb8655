"""The nccl backend over a gloo process group in place of NCCL: what arrives, and that a wait ends at its deadline."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_async.weights import backends
from grpo_async.weights.backends import GroupClosedError, NcclBackend

CPU = torch.device("cpu")
LIMIT_S = 60.0


class _Group:
    """A gloo group whose broadcasts can be made to hang until the time limit, or until it is aborted; what `wait` then does is what
    NCCL's does: raise at the limit, return after an abort."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("g", store), rank, 2, timedelta(seconds=LIMIT_S))
        self.hangs = False
        self.aborted = threading.Event()
        self.limits_s: list[float] = []

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Any:
        work = None if self.hangs else self._group.broadcast(tensors, options)

        def wait(limit: timedelta) -> None:
            self.limits_s.append(limit.total_seconds())
            if work is not None:
                work.wait(limit)
            elif not self.aborted.wait(limit.total_seconds()):
                raise RuntimeError("Watchdog caught collective operation timeout")

        return SimpleNamespace(wait=wait)

    def abort(self) -> None:
        self.aborted.set()


def _pair(monkeypatch: pytest.MonkeyPatch) -> tuple[list[NcclBackend], list[_Group]]:
    """Trainer and worker."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: _Group(store, rank), range(2)))
        backends = pool.map(lambda group: NcclBackend(group, device=CPU, timeout_s=LIMIT_S), groups)
        return list(backends), groups


def test_a_broadcast_that_hangs_ends_at_its_deadline_which_begins_with_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch counts from the start of a broadcast, and the one before may have taken its whole time until then."""
    (trainer, _), groups = _pair(monkeypatch)
    groups[0].hangs = True
    wait = trainer.send(trainer.buffer(8), timeout_s=0.2)
    began = time.monotonic()
    monkeypatch.setattr(backends.time, "monotonic", lambda: began + 5.0)
    with pytest.raises(RuntimeError, match="did not end within 0 s"):
        wait()
    assert groups[0].limits_s[-1] == pytest.approx(5.2, abs=0.1)
    assert groups[0].aborted.is_set()
    with pytest.raises(GroupClosedError):
        trainer.send(torch.empty(8, dtype=torch.uint8), timeout_s=0.2)
