"""In place of CUDA IPC: memory that two processes share through files. Also the program of the worker's process.

python -m tests.weights.shared_files STORE KEY FOLDER RESULT NUM_BYTES...
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from grpo_async.inference.surface import WeightInitInfo
from grpo_async.weights.gloo import WeightGroup
from grpo_async.weights.ipc import IpcBackend
from grpo_async.weights.rendezvous import Rendezvous, join_rendezvous
from grpo_async.weights.staging import Staging

TIMEOUT_S = 60.0


class SharedFiles:
    """SharedMemory on the CPU; records what is shared, opened and released."""

    device = torch.device("cpu")

    def __init__(self, folder: Path) -> None:
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

    def open(self, handle: Any) -> torch.Tensor:
        self.events.append(f"open {Path(handle['path']).name}")
        return torch.from_file(handle["path"], shared=True, size=handle["size"], dtype=torch.uint8)

    def release(self) -> None:
        self.events.append("release")


def roomy_staging() -> Staging:
    return Staging(torch.device("cpu"), free_bytes=lambda: 1 << 40)


def host_group(rendezvous: Rendezvous) -> WeightGroup:
    """The trainer's end of a group of two."""
    rendezvous.wait("cpu")
    rendezvous.begin()
    return WeightGroup(rendezvous.store, rank=0, world_size=2, address="127.0.0.1", timeout_s=TIMEOUT_S)


def join_group(store_file: str, key: str) -> WeightGroup:
    info = WeightInitInfo(
        master_address="127.0.0.1", store_file=store_file, rank_offset=1, world_size=2, timeout_s=TIMEOUT_S, key=key
    )
    store = join_rendezvous(info, rank=1, device="cpu")
    return WeightGroup(store, rank=1, world_size=2, address="127.0.0.1", timeout_s=TIMEOUT_S)


def main() -> None:
    store_file, key, folder, result, *sizes = sys.argv[1:]
    torch.set_num_threads(1)
    group = join_group(store_file, key)
    memory = SharedFiles(Path(folder))
    backend = IpcBackend(group, memory=memory, staging=roomy_staging())
    backend.expect(sum(map(int, sizes)))
    received = [backend.receive(int(size), timeout_s=TIMEOUT_S) for size in sizes]
    backend.close()
    Path(result).write_text(json.dumps({"sums": [int(part.sum()) for part in received], "events": memory.events}))


if __name__ == "__main__":
    main()
