"""The nccl backend over a gloo process group in place of NCCL: where buckets land, and that a wait ends at its deadline."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_async.weights import nccl
from grpo_async.weights.nccl import NcclBackend
from grpo_async.weights.staging import Staging

CPU = torch.device("cpu")
LIMIT_S = 60.0


class _Group:
    """A gloo group that counts, and whose broadcasts can be made to hang until it is aborted."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("g", store), rank, 2, timedelta(seconds=LIMIT_S))
        self.hangs = False
        self.aborted = threading.Event()

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Any:
        if self.hangs:
            return _Hanging(self.aborted)
        return self._group.broadcast(tensors, options)

    def abort(self) -> None:
        self.aborted.set()


class _Hanging:
    def __init__(self, aborted: threading.Event) -> None:
        self._aborted = aborted

    def wait(self) -> None:
        assert self._aborted.wait(LIMIT_S)


class _Queue:
    """What a CUDA stream does, at once."""

    def run(self, work: Callable[[], object]) -> None:
        work()


def _both(work: Callable[[int], Any]) -> list[Any]:
    results: dict[int, Any] = {}
    threads = [threading.Thread(target=lambda r=r: results.__setitem__(r, work(r)), daemon=True) for r in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    return [results[rank] for rank in range(2)]


def _pair(free_bytes: int = 1 << 40) -> tuple[list[NcclBackend], list[_Group]]:
    store = dist.HashStore()
    groups = _both(lambda rank: _Group(store, rank))

    def build(rank: int) -> NcclBackend:
        staging = Staging(CPU, free_bytes=lambda: free_bytes)
        return NcclBackend(groups[rank], device=CPU, queue=_Queue(), timeout_s=LIMIT_S, staging=staging)

    return _both(build), groups


@pytest.mark.parametrize("free_bytes", [1 << 40, 0], ids=["room on the device", "staged in host memory"])
def test_buckets_arrive_in_memory_of_their_own(free_bytes: int) -> None:
    (trainer, worker), _ = _pair(free_bytes)
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (100, 300, 50)]

    def run(rank: int) -> list[torch.Tensor]:
        if rank == 0:
            for part in data:
                trainer.send(trainer.buffer(part.numel()).copy_(part), timeout_s=LIMIT_S)
            return []
        worker.expect(450)
        return [worker.receive(part.numel(), timeout_s=LIMIT_S) for part in data]

    _, received = _both(run)
    assert all(torch.equal(part, sent) for part, sent in zip(received, data, strict=True))
    assert worker._staging.on_device == (free_bytes > 0)
    assert (worker._landing is None) == (free_bytes > 0)  # landed on the device, then moved


def test_staging_is_decided_by_the_room_that_is_left() -> None:
    """10 GiB free: 9 GiB are staged there, with 1 GiB left for loading; one byte more is not."""
    staging = Staging(CPU, free_bytes=lambda: 10 << 30)
    staging.expect(9 << 30)
    assert staging.on_device
    staging.expect((9 << 30) + 1)
    assert not staging.on_device


def test_a_broadcast_that_hangs_is_aborted_at_its_deadline() -> None:
    (trainer, _), groups = _pair()
    groups[0].hangs = True
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="did not end within 0 s"):
        trainer.send(trainer.buffer(8), timeout_s=0.2)
    assert time.monotonic() - began < LIMIT_S / 2
    assert groups[0].aborted.is_set()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.send(trainer.buffer(8), timeout_s=0.2)


def test_a_close_from_another_thread_ends_a_send_and_it_does_not_count_as_sent() -> None:
    (trainer, _), groups = _pair()
    groups[0].hangs = True
    closer = threading.Timer(0.1, trainer.close)
    closer.start()
    with pytest.raises(RuntimeError, match="closed during a broadcast"):
        trainer.send(trainer.buffer(8), timeout_s=LIMIT_S)


def test_the_watchdog_is_off_only_while_the_group_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's watchdog ends the whole process when a broadcast fails; the trainer's own groups keep theirs."""
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    with nccl._environment(nccl._NO_WATCHDOG):
        assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
        assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1"
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in os.environ
