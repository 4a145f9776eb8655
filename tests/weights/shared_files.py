"""Files in place of a GPU's memory that processes share; "cpu:1" is GPU-1."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from grpo_async.training.ranks import StopCommand, follow
from grpo_async.weights import backends, ipc, push
from grpo_async.weights.push import PushFailedError, WeightTransport, push_weights
from tests.support.waiting import eventually
from tests.training.statistics_jobs import make_config, make_context
from tests.weights.servers import LIMIT_S, Parameters, Workers


class SharedFiles:
    """Records what is shared, mapped and released in this process, by the names of the files."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.full: torch.device | None = None
        self._folder, self._paths, self._numbers = folder, {}, itertools.count()
        for name in ("finish_copies", "allocate", "handle_of", "map_buffer", "gpu_of", "release_mapped"):
            patch.setattr(ipc, name, getattr(self, name))
        for module in (backends, push):
            patch.setattr(module, "check_device", lambda transport, device: None)

    def gpu_of(self, device: torch.device) -> str:
        return f"GPU-{device.index or 0}"

    def allocate(self, num_bytes: int, device: torch.device) -> torch.Tensor:
        path = self._folder / f"{self.gpu_of(device)} {os.getpid()} {next(self._numbers)}"
        buffer = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        self._paths[buffer.data_ptr()] = path
        return buffer

    def handle_of(self, buffer: torch.Tensor) -> ipc.Handle:
        path = self._paths[buffer.data_ptr()]
        self.events.append(f"share {path.name}")
        fields: dict[str, Any] = {"offset": 0, "counter": b"", "counter_offset": 0, "event": b"", "needs_event": False}
        return ipc.Handle(gpu=path.name.split()[0], handle=str(path).encode(), size=buffer.numel(), **fields)

    def map_buffer(self, handle: ipc.Handle, device: torch.device) -> torch.Tensor:
        assert handle.gpu == self.gpu_of(device)
        path = Path(handle.handle.decode())
        self.events.append(f"map {path.name}")
        return torch.from_file(str(path), shared=True, size=handle.size, dtype=torch.uint8)

    def finish_copies(self, device: torch.device) -> None:
        if device == self.full:
            raise torch.OutOfMemoryError

    def release_mapped(self) -> None:
        self.events.append("release")


class _Changing(Parameters):
    """Other values in each push, the same ones on every rank. `wait` is called before the second bucket is gathered."""

    def __init__(self) -> None:
        super().__init__()
        self.wait: Callable[[], object] = lambda: None

    def gather(self) -> Iterator[torch.Tensor]:
        for name, tensor in self.tensors.items():
            self.tensors[name] = tensor + 1 if tensor.is_floating_point() else tensor
        first, *others = super().gather()
        yield first
        self.wait()
        yield from others


def _await_closings(shared: SharedFiles, number: int) -> None:
    assert eventually(lambda: shared.events.count("release") >= number, LIMIT_S)


def push_from_ranks(model: str, files: str) -> dict[str, Any]:
    """Two ranks push three times: to "a" with a worker on the GPU of each, and to "b" with one on GPU-1 and one elsewhere, which
    has no memory for the first bucket of the second push: the group closes while rank 0 gathers the next."""
    rank = dist.get_rank()
    shared = SharedFiles(Path(files), pytest.MonkeyPatch())
    context = make_context(model, make_config({"type": "grpo"}), reference=None)
    context.parameters = parameters = _Changing()
    context.device = torch.device("cpu", rank)
    if rank > 0:
        follow(context)
        return {}
    a = Workers("a", 2, devices=[torch.device("cpu", 1), torch.device("cpu", 0)])
    b = Workers("b", 2, devices=[torch.device("cpu", 7), torch.device("cpu", 1)])
    transport = WeightTransport("ipc", host="127.0.0.1", bucket_bytes=4096, timeout_s=LIMIT_S, device=context.device)
    equal, failures = [], 0

    def push_to(version: int, *servers: Any) -> None:
        push_weights(
            parameters,
            version=version,
            servers=servers,
            transport=transport,
            settings=context.config.weights,
            send_to_ranks=context.channel.send_all,
        )

    for version in range(1, 4):
        shared.full = torch.device("cpu", 7) if version == 2 else None
        closings = shared.events.count("release") + 5  # of all workers and of rank 0
        parameters.wait = partial(_await_closings, shared, closings) if shared.full else list
        try:
            push_to(version, a, b)
        except PushFailedError as error:
            failures += list(error.failures) == ["b"]
            continue
        tensors = parameters.tensors
        equal += [torch.equal(served[name], tensors[name]) for served in a.served + b.served for name in tensors]
    transport.close()
    context.channel.send_all(StopCommand())
    maps = [event for event in shared.events if event.startswith("map")]
    return {"equal": equal, "failures": failures, "maps": maps, "pid": os.getpid()}
