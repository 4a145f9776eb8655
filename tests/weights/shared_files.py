"""In place of CUDA IPC: memory that two processes share through files. Also the program of the worker's process.

python -m tests.weights.shared_files INIT_INFO FOLDER RESULT NUM_BYTES...
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from grpo_async.inference.api import WeightInitInfo
from grpo_async.weights import buckets
from grpo_async.weights.gloo import GlooBackend
from grpo_async.weights.ipc import CudaMemory, IpcBackend
from grpo_async.weights.rendezvous import Rendezvous, join_rendezvous

TIMEOUT_S = 60.0


class SharedFiles(CudaMemory):
    """On the CPU; records what is shared, opened and released."""

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

    def share(self, buffer: torch.Tensor) -> dict[str, Any]:
        path = self._paths[buffer.data_ptr()]
        self.events.append(f"share {path.name}")
        return {"path": str(path), "size": buffer.numel()}

    def open(self, handle: dict[str, Any]) -> torch.Tensor:
        self.events.append(f"open {Path(handle['path']).name}")
        return torch.from_file(handle["path"], shared=True, size=handle["size"], dtype=torch.uint8)

    def release(self) -> None:
        self.events.append("release")


def host_group(rendezvous: Rendezvous) -> GlooBackend:
    """The trainer's end of a group of two."""
    rendezvous.wait("cpu")
    rendezvous.begin()
    return GlooBackend(rendezvous.store, rank=0, world_size=2, address="127.0.0.1", timeout_s=TIMEOUT_S)


def join_group(info: WeightInitInfo) -> GlooBackend:
    """The worker's end."""
    store = join_rendezvous(info, rank=1, device="cpu")
    return GlooBackend(store, rank=1, world_size=2, address="127.0.0.1", timeout_s=TIMEOUT_S)


def group_of_two() -> tuple[GlooBackend, GlooBackend]:
    """Trainer and worker in this process."""
    rendezvous = Rendezvous("127.0.0.1", world_size=2, timeout_s=TIMEOUT_S)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(join_group, rendezvous.init_info("gloo", rank_offset=1))
        group = host_group(rendezvous)
        worker = joining.result(TIMEOUT_S)
    rendezvous.close()
    return group, worker


def main() -> None:
    init_info, folder, result, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    buckets.free_cuda_bytes = lambda device: 1 << 40
    memory = SharedFiles(Path(folder))
    backend = IpcBackend(join_group(WeightInitInfo.model_validate_json(init_info)), memory=memory)
    backend.expect(sum(map(int, sizes)))
    received = [backend.receive(int(size), timeout_s=TIMEOUT_S) for size in sizes]
    backend.close()
    Path(result).write_text(json.dumps({"sums": [int(part.sum()) for part in received], "events": memory.events}))


if __name__ == "__main__":
    main()
