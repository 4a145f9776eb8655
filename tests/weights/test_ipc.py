"""The ipc backend over shared files in place of a GPU's memory, and what it refuses."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.utils.concurrency import in_thread
from grpo_async.weights import ipc
from grpo_async.weights.backends import Rendezvous, join_group
from grpo_async.weights.buckets import pack
from tests.support.ranks import run_on_ranks
from tests.weights.shared_files import SharedFiles

TIMEOUT_S = 60.0
CPU = torch.device("cpu")


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SharedFiles:
    return SharedFiles(tmp_path, monkeypatch)


def _group_of_two(worker: torch.device = CPU) -> tuple[Any, Any]:
    """Trainer and worker."""
    rendezvous = Rendezvous("127.0.0.1", world_size=2, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join_group, rendezvous.init_info("ipc", rank_offset=1), rank=1, device=worker)
        return rendezvous.join("ipc", CPU), joining.result(TIMEOUT_S)


def test_a_send_ends_only_when_the_bucket_was_copied_out(files: SharedFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the trainer would refill the buffer while the worker copies it."""
    trainer, worker = _group_of_two()
    trainer.share(8, [])
    may_copy = threading.Event()

    def finish(device: torch.device) -> None:
        if "receive" in threading.current_thread().name:
            assert may_copy.wait(TIMEOUT_S)

    monkeypatch.setattr(ipc, "finish_copies", finish)
    receiving = in_thread(worker.receive(8, timeout_s=TIMEOUT_S), name="receive")
    packed = pack([torch.arange(8, dtype=torch.uint8)], into=trainer.buffer(8))
    sending = in_thread(trainer.send(packed, timeout_s=TIMEOUT_S), name="send")
    with pytest.raises(TimeoutError):
        sending.result(0.3)
    may_copy.set()
    sending.result(TIMEOUT_S)
    received = receiving.result(TIMEOUT_S)
    for _ in range(2):
        trainer.buffer(8).fill_(9)
    assert received.tolist() == list(range(8))  # a copy, not the buffer


@pytest.mark.slow
def test_each_worker_gets_the_weights_from_the_rank_on_its_gpu(tiny_model: Path, tmp_path: Path) -> None:
    """Also after a failed push, in a new group."""
    told = run_on_ranks(
        "push_from_ranks", 2, tmp_path, module="tests.weights.shared_files", model=tiny_model, files=tmp_path
    )
    assert told["failures"] == 1
    assert told["equal"]
    assert all(told["equal"])
    # three workers map two buffers in each of two groups; those on GPU-1 another process's
    assert len(told["maps"]) == 12
    own = f" {told['pid']} "
    assert all((own in event) == ("GPU-0" in event) for event in told["maps"])
