"""The nccl backend over a gloo process group in place of NCCL: where buckets land, and that a wait ends at its deadline."""

from __future__ import annotations

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_async.weights import buckets, nccl
from grpo_async.weights.buckets import Staging
from grpo_async.weights.nccl import NcclBackend

CPU = torch.device("cpu")
LIMIT_S = 60.0


class _Group:
    """A gloo group whose broadcasts can be made to hang until it is aborted."""

    def __init__(self, store: dist.Store, rank: int) -> None:
        self._group = dist.ProcessGroupGloo(dist.PrefixStore("g", store), rank, 2, timedelta(seconds=LIMIT_S))
        self.hangs = False
        self.aborted = threading.Event()

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> Any:
        if self.hangs:
            return SimpleNamespace(wait=lambda: self.aborted.wait(LIMIT_S))
        return self._group.broadcast(tensors, options)

    def abort(self) -> None:
        self.aborted.set()


def _pair(monkeypatch: pytest.MonkeyPatch, free_bytes: int = 1 << 40) -> tuple[list[NcclBackend], list[_Group]]:
    """Trainer and worker. What a CUDA stream does is done at once."""
    monkeypatch.setattr(buckets, "free_cuda_bytes", lambda device: free_bytes)
    monkeypatch.setattr(nccl, "_on_own_stream", lambda device: lambda work: work())
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        groups = list(pool.map(lambda rank: _Group(store, rank), range(2)))
        backends = pool.map(lambda group: NcclBackend(group, device=CPU, timeout_s=LIMIT_S), groups)
        return list(backends), groups


@pytest.mark.parametrize("free_bytes", [1 << 40, 0], ids=["room on the device", "staged in host memory"])
def test_buckets_arrive_in_memory_of_their_own(free_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    (trainer, worker), _ = _pair(monkeypatch, free_bytes)
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (100, 300, 50)]

    def receive() -> list[torch.Tensor]:
        worker.expect(450)
        return [worker.receive(part.numel(), timeout_s=LIMIT_S) for part in data]

    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive)
        for part in data:
            trainer.send(trainer.buffer(part.numel()).copy_(part), timeout_s=LIMIT_S)
        received = receiving.result(LIMIT_S)
    assert all(torch.equal(part, sent) for part, sent in zip(received, data, strict=True))
    assert worker._staging.on_device == (free_bytes > 0)
    assert (worker._landing is None) == (free_bytes > 0)  # landed on the device, then moved


def test_staging_is_decided_by_the_room_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """10 GiB free: 9 GiB are staged there, with 1 GiB left for loading; one byte more is not."""
    monkeypatch.setattr(buckets, "free_cuda_bytes", lambda device: 10 << 30)
    staging = Staging(CPU)
    staging.expect(9 << 30)
    assert staging.on_device
    staging.expect((9 << 30) + 1)
    assert not staging.on_device


def test_a_broadcast_that_hangs_is_aborted_at_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    (trainer, _), groups = _pair(monkeypatch)
    groups[0].hangs = True
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="did not end within 0 s"):
        trainer.send(trainer.buffer(8), timeout_s=0.2)
    assert time.monotonic() - started < LIMIT_S / 2
    assert groups[0].aborted.is_set()
    with pytest.raises(RuntimeError, match="closed"):
        trainer.send(trainer.buffer(8), timeout_s=0.2)


def test_a_close_from_another_thread_ends_a_send_and_it_does_not_count_as_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    (trainer, _), groups = _pair(monkeypatch)
    groups[0].hangs = True
    threading.Timer(0.1, trainer.close).start()
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
