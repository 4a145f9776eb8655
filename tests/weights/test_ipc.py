"""The ipc backend over shared files in place of a GPU's memory, and what it refuses."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from grpo_async.utils.concurrency import in_thread
from grpo_async.weights import backends
from grpo_async.weights.backends import GlooBackend, Handle, IpcBackend, Rendezvous, join_group
from grpo_async.weights.buckets import pack

TIMEOUT_S = 60.0
CPU = torch.device("cpu")
HANDLE = {
    "gpu": "GPU-1", "handle": "00ff", "size": 100, "offset": 0, "counter": "2f61", "counter_offset": 8, "event": "",
    "needs_event": True,
}  # fmt: skip


class _Files(IpcBackend):
    """Memory that two ends share through files; records what is shared, mapped and released. A handle holds the file's path."""

    def __init__(self, group: GlooBackend, folder: Path) -> None:
        assert group._store is not None
        super().__init__(group, group._store, device=CPU)
        self.events: list[str] = []
        self._folder = folder
        self._paths: dict[int, Path] = {}

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        path = self._folder / f"{len(self._paths)}"
        buffer = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        self._paths[buffer.data_ptr()] = path
        return buffer

    def _share(self, buffer: torch.Tensor) -> Handle:
        path = self._paths[buffer.data_ptr()]
        self.events.append(f"share {path.name}")
        fields = {"offset": 0, "counter": b"", "counter_offset": 0, "event": b"", "needs_event": False}
        return Handle(gpu="cpu", handle=str(path).encode(), size=buffer.numel(), **fields)

    def _map(self, handle: Handle) -> torch.Tensor:
        path = Path(handle.handle.decode())
        self.events.append(f"map {path.name}")
        return torch.from_file(str(path), shared=True, size=handle.size, dtype=torch.uint8)

    def _release(self) -> None:
        self.events.append("release")


class _LateStore:
    """Each `set` takes effect later: it has no answer. What the same client asks next waits for it."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def set(self, key: str, value: str) -> None:
        self._setting = threading.Timer(0.3, self._store.set, (key, value))
        self._setting.start()

    def get(self, key: str) -> Any:
        self._setting.join()
        return self._store.get(key)


def _group_of_two() -> tuple[Any, Any]:
    """Trainer and worker."""
    rendezvous = Rendezvous("127.0.0.1", world_size=2, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join_group, rendezvous.init_info("gloo", rank_offset=1), rank=1, device=CPU)
        return rendezvous.join("gloo", CPU), joining.result(TIMEOUT_S)


def test_buckets_cross_through_two_buffers_that_are_shared_once(tmp_path: Path) -> None:
    # buffers 0, 1 of 1000 bytes; the fifth bucket is larger than the next buffer, which is allocated again
    sizes = [1000, 1000, 900, 10, 5000, 1000]
    trainer, worker = (_Files(group, tmp_path) for group in _group_of_two())
    trainer._store = _LateStore(trainer._store)  # type: ignore[assignment]
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
    assert trainer.events == ["share 0", "share 1", "share 2", "release"]
    assert worker.events == ["map 0", "map 1", "map 2", "release"]


def test_a_send_ends_only_when_the_bucket_was_copied_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the trainer would refill the buffer while the worker copies it."""
    trainer, worker = (_Files(group, tmp_path) for group in _group_of_two())
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


def test_a_worker_refuses_handles_and_sizes_that_it_does_not_expect(tmp_path: Path) -> None:
    for num_bytes, handles, message in (
        (8, "[{}]", "no handles of the trainer"),
        (9, None, "less than the 9 bytes"),
    ):
        trainer, worker = (_Files(group, tmp_path) for group in _group_of_two())
        receiving = in_thread(worker.receive(num_bytes, timeout_s=TIMEOUT_S), name="receive")
        if handles is None:
            trainer.send(trainer.buffer(8), timeout_s=TIMEOUT_S)
        else:
            trainer._open().set("buffer 1", handles)
            trainer._group.confirm(timeout_s=TIMEOUT_S)
        with pytest.raises(RuntimeError, match=message):
            receiving.result(TIMEOUT_S)
        worker.close()
        trainer.close()


def test_a_handle_is_checked_and_mapped_on_its_own_device_only(monkeypatch: pytest.MonkeyPatch) -> None:
    handle = Handle.model_validate_json(json.dumps(HANDLE))
    assert (handle.handle, handle.counter) == (b"\x00\xff", b"/a")
    assert Handle.model_validate_json(handle.model_dump_json()) == handle
    for wrong in ({"size": -1}, {"handle": "ff" * 5000}, {"handle": "zz"}):
        with pytest.raises(ValidationError, match=next(iter(wrong))):
            Handle.model_validate_json(json.dumps({**HANDLE, **wrong}))
    monkeypatch.setattr(backends, "_uuid", lambda device: "GPU-2")
    backend = IpcBackend(None, None, device=CPU)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match=r"on GPU-1, this worker's model is on GPU-2; set weights\.transport: nccl"):
        backend._map(handle)
