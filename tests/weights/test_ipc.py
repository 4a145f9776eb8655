"""The ipc backend between two processes, over shared files in place of a GPU's memory, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.utils.threads import in_thread
from grpo_async.weights.buckets import pack
from grpo_async.weights.ipc import IpcBackend, check_handle
from grpo_async.weights.rendezvous import Rendezvous
from tests.weights.shared_files import TIMEOUT_S, SharedFiles, group_of_two, host_group


def test_buckets_cross_processes_through_two_buffers_that_are_shared_once(tmp_path: Path) -> None:
    # buffers 0, 1 of 1000 bytes; the fifth bucket is larger than the buffer whose turn it is, which is made anew
    sizes = [1000, 1000, 900, 10, 5000, 1000]
    rendezvous = Rendezvous("127.0.0.1", world_size=2, timeout_s=TIMEOUT_S)
    result = tmp_path / "result.json"
    init_info = rendezvous.init_info("ipc", rank_offset=1).model_dump_json()
    arguments = [init_info, str(tmp_path), str(result), *map(str, sizes)]
    worker = subprocess.Popen([sys.executable, "-m", "tests.weights.shared_files", *arguments])
    try:
        memory = SharedFiles(tmp_path)
        backend = IpcBackend(host_group(rendezvous), memory=memory)
        data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]
        for part in data:
            backend.send(pack([part], into=backend.buffer(part.numel())), timeout_s=TIMEOUT_S)
        assert worker.wait(TIMEOUT_S) == 0
        backend.close()
    finally:
        worker.kill()
        worker.wait(TIMEOUT_S)
        rendezvous.close()
    received = json.loads(result.read_text())
    assert received["sums"] == [int(part.sum()) for part in data]
    assert memory.events == ["share 0", "share 1", "share 2", "release"]
    assert received["events"] == ["open 0", "open 1", "open 2", "release"]


def test_a_send_ends_only_when_the_bucket_was_copied_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the trainer would fill the buffer again under the worker's hands."""
    trainer, worker = (IpcBackend(group, memory=SharedFiles(tmp_path)) for group in group_of_two())
    may_copy = threading.Event()
    keep = worker._staging.keep

    def slow_keep(bucket: torch.Tensor) -> torch.Tensor:
        assert may_copy.wait(TIMEOUT_S)
        return keep(bucket)

    monkeypatch.setattr(worker._staging, "keep", slow_keep)
    receiving = in_thread(lambda: worker.receive(8, timeout_s=TIMEOUT_S), name="receive")
    packed = pack([torch.arange(8, dtype=torch.uint8)], into=trainer.buffer(8))
    sending = in_thread(lambda: trainer.send(packed, timeout_s=TIMEOUT_S), name="send")
    with pytest.raises(TimeoutError):
        sending.result(0.3)
    may_copy.set()
    sending.result(TIMEOUT_S)
    received = receiving.result(TIMEOUT_S)
    for _ in range(2):
        trainer.buffer(8).fill_(9)
    assert received.tolist() == list(range(8))  # a copy, not the buffer


@pytest.mark.parametrize(
    ("signal", "message"),
    [
        ({"buffer": 5, "num_bytes": 8, "handles": None}, "buffer"),
        ({"buffer": "0", "num_bytes": 8, "handles": None}, "valid integer"),
        ({"buffer": 0, "num_bytes": 9, "handles": None}, "sends 9 bytes, 8 are expected"),
        ({"buffer": 0, "num_bytes": 8, "handles": None}, "has not shared"),
        ({"buffer": 0, "num_bytes": 8, "handles": [{}, {}]}, "2 memory handles for 1 workers"),
        ({"buffer": 0, "num_bytes": 8}, "not a signal"),
        (None, "not a signal"),
    ],
)
def test_a_worker_refuses_signals_that_it_does_not_expect(tmp_path: Path, signal: Any, message: str) -> None:
    group, other = group_of_two()
    worker = IpcBackend(other, memory=SharedFiles(tmp_path))
    receiving = in_thread(lambda: worker.receive(8, timeout_s=TIMEOUT_S), name="receive")
    body = b"\x80pickle" if signal is None else json.dumps(signal).encode()
    group.broadcast_bytes(body, timeout_s=TIMEOUT_S, max_bytes=1 << 20)
    with pytest.raises(RuntimeError, match=message):
        receiving.result(TIMEOUT_S)
    worker.close()


HANDLE = {
    "device": "GPU-1", "handle": "00ff", "size": 100, "offset": 0, "counter": "2f61", "counter_offset": 8, "event": "",
    "needs_event": True,
}  # fmt: skip


def test_a_handle_becomes_the_arguments_of_torch() -> None:
    assert check_handle(HANDLE, device="GPU-1") == (b"\x00\xff", 100, 0, b"/a", 8, b"", True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": "GPU-2"}, "on GPU-2, this worker's model is on GPU-1; set weights.transport: nccl"),
        ({"size": "100"}, "size"),
        ({"size": True}, "size"),
        ({"size": -1}, "size"),
        ({"handle": "ff" * 5000}, "at most 8192 characters"),
        ({"handle": "zz"}, "handle"),
        ({"more": 1}, "more"),
    ],
)
def test_a_handle_is_checked_before_it_is_opened(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        check_handle({**HANDLE, **changes}, device="GPU-1")
