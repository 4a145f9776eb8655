"""In place of CUDA IPC: memory that two ends share through files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from grpo_async.weights.gloo import GlooBackend
from grpo_async.weights.ipc import CudaMemory, Handle
from grpo_async.weights.rendezvous import GroupRendezvous, join_rendezvous

TIMEOUT_S = 60.0


class SharedFiles(CudaMemory):
    """On the CPU; records what is shared, opened and released. A handle holds the file's path."""

    def __init__(self, folder: Path) -> None:
        super().__init__(torch.device("cpu"))
        self.events: list[str] = []
        self._folder = folder
        self._paths: dict[int, Path] = {}

    def allocate(self, num_bytes: int) -> torch.Tensor:
        path = self._folder / f"{len(self._paths)}"
        buffer = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        self._paths[buffer.data_ptr()] = path
        return buffer

    def share(self, buffer: torch.Tensor) -> Handle:
        path = self._paths[buffer.data_ptr()]
        self.events.append(f"share {path.name}")
        fields = {"offset": 0, "counter": b"", "counter_offset": 0, "event": b"", "needs_event": False}
        return Handle(device="cpu", handle=str(path).encode(), size=buffer.numel(), **fields)

    def open(self, handle: Handle) -> torch.Tensor:
        path = Path(handle.handle.decode())
        self.events.append(f"open {path.name}")
        return torch.from_file(str(path), shared=True, size=handle.size, dtype=torch.uint8)

    def release(self) -> None:
        self.events.append("release")


def group_of_two() -> tuple[GlooBackend, GlooBackend]:
    """Trainer and worker."""
    rendezvous = GroupRendezvous("127.0.0.1", world_size=2, timeout_s=TIMEOUT_S)

    def join() -> GlooBackend:
        store = join_rendezvous(rendezvous.init_info("gloo", rank_offset=1), rank=1, device="cpu")
        return GlooBackend(store, rank=1, world_size=2, address="127.0.0.1", timeout_s=TIMEOUT_S)

    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join)
        rendezvous.wait("cpu")
        rendezvous.begin()
        group = GlooBackend(rendezvous.store, rank=0, world_size=2, address="127.0.0.1", timeout_s=TIMEOUT_S)
        worker = joining.result(TIMEOUT_S)
    rendezvous.close()
    return group, worker
