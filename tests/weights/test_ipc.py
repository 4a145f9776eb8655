"""The ipc backend over shared files in place of a GPU's memory, and what it refuses."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from grpo_async.utils.concurrency import in_thread
from grpo_async.weights import ipc
from grpo_async.weights.buckets import pack
from grpo_async.weights.ipc import CudaMemory, Handle, IpcBackend, Signal
from tests.weights.shared_files import TIMEOUT_S, SharedFiles, group_of_two

HANDLE = {
    "device": "GPU-1", "handle": "00ff", "size": 100, "offset": 0, "counter": "2f61", "counter_offset": 8, "event": "",
    "needs_event": True,
}  # fmt: skip


def test_buckets_cross_through_two_buffers_that_are_shared_once(tmp_path: Path) -> None:
    # buffers 0, 1 of 1000 bytes; the fifth bucket is larger than the buffer whose turn it is, which is made anew
    sizes = [1000, 1000, 900, 10, 5000, 1000]
    memories = [SharedFiles(tmp_path), SharedFiles(tmp_path)]
    trainer, worker = (IpcBackend(group, memory=memory) for group, memory in zip(group_of_two(), memories, strict=True))
    data = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in sizes]

    def receive() -> list[torch.Tensor]:
        received = [worker.receive(size, timeout_s=TIMEOUT_S)() for size in sizes]
        worker.close()
        return received

    receiving = in_thread(receive, name="receive")
    for part in data:
        trainer.send(pack([part], into=trainer.buffer(part.numel())), timeout_s=TIMEOUT_S)()
    for sent, received in zip(data, receiving.result(TIMEOUT_S), strict=True):
        assert torch.equal(sent, received)
    trainer.close()
    assert memories[0].events == ["share 0", "share 1", "share 2", "release"]
    assert memories[1].events == ["open 0", "open 1", "open 2", "release"]


def test_a_send_ends_only_when_the_bucket_was_copied_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the trainer would fill the buffer again under the worker's hands."""
    trainer, worker = (IpcBackend(group, memory=SharedFiles(tmp_path)) for group in group_of_two())
    may_copy = threading.Event()

    def slow_copy(bucket: torch.Tensor) -> torch.Tensor:
        assert may_copy.wait(TIMEOUT_S)
        return bucket.clone()

    monkeypatch.setattr(worker, "_copy", slow_copy)
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


@pytest.mark.parametrize(
    ("signal", "message"),
    [
        ({"buffer": 5, "num_bytes": 8, "handles": None}, "buffer"),
        ({"buffer": "0", "num_bytes": 8, "handles": None}, "valid integer"),
        ({"buffer": 0, "num_bytes": 9, "handles": None}, "sent 9 bytes, but 8 were expected"),
        ({"buffer": 0, "num_bytes": 8, "handles": None}, "has not shared"),
        ({"buffer": 0, "num_bytes": 8, "handles": [HANDLE, HANDLE]}, "2 memory handles for 1 workers"),
        ({"buffer": 0, "num_bytes": 8, "handles": [{}]}, "not a signal"),
        ({"buffer": 0, "num_bytes": 8}, "not a signal"),
        (None, "not a signal"),
    ],
)
def test_a_worker_refuses_signals_that_it_does_not_expect(tmp_path: Path, signal: Any, message: str) -> None:
    group, other = group_of_two()
    worker = IpcBackend(other, memory=SharedFiles(tmp_path))
    receiving = in_thread(worker.receive(8, timeout_s=TIMEOUT_S), name="receive")
    body = b"\x80pickle" if signal is None else json.dumps(signal).encode()
    group.broadcast_bytes(body, timeout_s=TIMEOUT_S)
    with pytest.raises(RuntimeError, match=message):
        receiving.result(TIMEOUT_S)
    worker.close()


def test_a_handle_arrives_as_it_was_sent_and_is_opened_on_its_own_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle(
        device="GPU-1",
        handle=b"\x00\xff",
        size=100,
        offset=0,
        counter=b"/a",
        counter_offset=8,
        event=b"",
        needs_event=True,
    )
    signal = Signal(buffer=0, num_bytes=8, handles=[handle])
    assert json.loads(signal.model_dump_json())["handles"] == [HANDLE]
    assert Signal.model_validate_json(signal.model_dump_json()) == signal
    monkeypatch.setattr(ipc, "device_identity", lambda device: "GPU-2")
    with pytest.raises(RuntimeError, match=r"on GPU-1, this worker's model is on GPU-2; set weights\.transport: nccl"):
        CudaMemory(torch.device("cpu")).open(handle)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"size": "100"}, "size"),
        ({"size": True}, "size"),
        ({"size": -1}, "size"),
        ({"handle": "ff" * 5000}, "at most 4096 bytes"),
        ({"handle": "zz"}, "handle"),
        ({"more": 1}, "more"),
    ],
)
def test_a_handle_is_checked_before_it_is_opened(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Handle.model_validate_json(json.dumps({**HANDLE, **changes}))
