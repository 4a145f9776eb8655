"""The nccl backend over a stand-in for NCCL: a wait ends at its deadline."""

from __future__ import annotations

import time
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_async.weights import backends
from grpo_async.weights.backends import GroupClosedError, NcclBackend


class _Group:
    """Its broadcasts end at once, or, when it `hangs`, as NCCL's at the limit of the wait."""

    def __init__(self) -> None:
        self.hangs = self.is_aborted = False
        self.limits_s: list[float] = []

    def broadcast(self, *_: Any) -> Any:
        def wait(limit: timedelta) -> None:
            self.limits_s.append(limit.total_seconds())
            if self.hangs:
                raise RuntimeError("Watchdog caught collective operation timeout")

        return SimpleNamespace(wait=wait)

    def abort(self) -> None:
        self.is_aborted = True


def test_a_broadcast_that_hangs_ends_at_its_deadline_which_begins_with_the_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch counts from the start of a broadcast, and the one before may have taken its whole time until then."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    group = _Group()
    trainer = NcclBackend(group, device=torch.device("cpu"), timeout_s=60.0)
    group.hangs = True
    wait = trainer.send(trainer.buffer(8), timeout_s=0.2)
    began = time.monotonic()
    monkeypatch.setattr(backends.time, "monotonic", lambda: began + 5.0)
    with pytest.raises(RuntimeError, match="did not end within 0 s"):
        wait()
    assert group.limits_s[-1] == pytest.approx(5.2, abs=0.1)
    assert group.is_aborted
    with pytest.raises(GroupClosedError):
        trainer.send(torch.empty(8, dtype=torch.uint8), timeout_s=0.2)
