"""The ipc backend between two processes, over shared files in place of a GPU's memory, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_async.weights.buckets import pack
from grpo_async.weights.ipc import IpcBackend, check_handle
from grpo_async.weights.rendezvous import Rendezvous
from tests.weights.shared_files import TIMEOUT_S, SharedFiles, host_group, join_group, roomy_staging


def test_buckets_cross_processes_through_two_buffers_that_are_shared_once(tmp_path: Path) -> None:
    # buffers 0, 1 of 1000 bytes; the fifth bucket is larger than the buffer whose turn it is, which is made anew
    sizes = [1000, 1000, 900, 10, 5000, 1000]
    rendezvous = Rendezvous("127.0.0.1", world_size=2, timeout_s=TIMEOUT_S)
    result = tmp_path / "result.json"
    worker = subprocess.Popen(
        [
            sys.executable, "-m", "tests.weights.shared_files",
            rendezvous.store_file, rendezvous.key, str(tmp_path), str(result), *map(str, sizes),
        ]
    )  # fmt: skip
    try:
        group = host_group(rendezvous)
        memory = SharedFiles(tmp_path)
        backend = IpcBackend(group, memory=memory, staging=roomy_staging())
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


class _Pair:
    """Trainer and worker in one process, in a real group."""

    def __init__(self, folder: Path) -> None:
        rendezvous = Rendezvous("127.0.0.1", world_size=2, timeout_s=TIMEOUT_S)
        with ThreadPoolExecutor(1) as pool:
            joining = pool.submit(join_group, rendezvous.store_file, rendezvous.key)
            self.group = host_group(rendezvous)
            group = joining.result(TIMEOUT_S)
        rendezvous.close()
        self.trainer = IpcBackend(self.group, memory=SharedFiles(folder), staging=roomy_staging())
        self.worker = IpcBackend(group, memory=SharedFiles(folder), staging=roomy_staging())

    def receive(self, num_bytes: int, results: list[Any]) -> threading.Thread:
        def run() -> None:
            try:
                results.append(self.worker.receive(num_bytes, timeout_s=TIMEOUT_S))
            except RuntimeError as error:
                results.append(error)
                self.worker.close()

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread


def test_a_send_ends_only_when_the_bucket_was_copied_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the trainer would fill the buffer again under the worker's hands."""
    pair = _Pair(tmp_path)
    may_copy, sent = threading.Event(), threading.Event()
    keep = pair.worker._staging.keep

    def slow_keep(bucket: torch.Tensor) -> torch.Tensor:
        assert may_copy.wait(TIMEOUT_S)
        return keep(bucket)

    monkeypatch.setattr(pair.worker._staging, "keep", slow_keep)
    received: list[Any] = []
    receiving = pair.receive(8, received)

    def send() -> None:
        pair.trainer.send(pack([torch.arange(8, dtype=torch.uint8)], into=pair.trainer.buffer(8)), timeout_s=TIMEOUT_S)
        sent.set()

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    assert not sent.wait(0.3)
    may_copy.set()
    assert sent.wait(TIMEOUT_S)
    receiving.join(TIMEOUT_S)
    pair.trainer.buffer(8).fill_(9)
    pair.trainer.buffer(8).fill_(9)
    assert received[0].tolist() == list(range(8))  # a copy, not the buffer


@pytest.mark.parametrize(
    ("signal", "words"),
    [
        ({"buffer": 5, "num_bytes": 8, "handles": None}, "no buffer 5"),
        ({"buffer": "0", "num_bytes": 8, "handles": None}, "no buffer '0'"),
        ({"buffer": 0, "num_bytes": 9, "handles": None}, "sends 9 bytes, 8 are expected"),
        ({"buffer": 0, "num_bytes": 8, "handles": None}, "has not shared"),
        ({"buffer": 0, "num_bytes": 8, "handles": [{}, {}]}, "2 memory handles for 1 workers"),
        ({"buffer": 0, "num_bytes": 8, "handles": "x"}, "not a list"),
        ({"buffer": 0, "num_bytes": 8}, "not a signal"),
        ([1], "not a signal"),
        (None, "not JSON"),
    ],
)
def test_a_worker_refuses_signals_that_it_does_not_expect(tmp_path: Path, signal: Any, words: str) -> None:
    pair = _Pair(tmp_path)
    results: list[Any] = []
    receiving = pair.receive(8, results)
    body = b"\x80pickle" if signal is None else json.dumps(signal).encode()
    pair.group.broadcast_bytes(body, timeout_s=TIMEOUT_S, max_bytes=1 << 20)
    receiving.join(TIMEOUT_S)
    assert words in str(results[0])


HANDLE = {
    "device": "GPU-1", "handle": "00ff", "size": 100, "offset": 0, "counter": "2f61", "counter_offset": 8, "event": "",
    "needs_event": True,
}  # fmt: skip


def test_a_handle_becomes_the_arguments_of_torch() -> None:
    assert check_handle(HANDLE, device="GPU-1") == (b"\x00\xff", 100, 0, b"/a", 8, b"", True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"device": "GPU-2"}, "on GPU-2, this worker's model is on GPU-1; set weights.transport: nccl"),
        ({"size": "100"}, "size of a memory handle is str, not int"),
        ({"size": True}, "size of a memory handle is bool, not int"),
        ({"size": -1}, "size of a memory handle is -1"),
        ({"handle": "ff" * 5000}, "10000 characters"),
        ({"handle": "zz"}, "hexadecimal"),
        ({"more": 1}, "has the fields"),
    ],
)
def test_a_handle_is_looked_at_before_it_is_opened(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(RuntimeError, match=words):
        check_handle({**HANDLE, **changes}, device="GPU-1")
