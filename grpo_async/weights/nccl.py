"""Buckets between GPUs over NCCL: a communicator of the weight group alone, outside torch's default process group.

torch's ProcessGroupNCCL over the store of the rendezvous; it takes NCCL's id from there as bytes (vLLM's own group unpickles what
it finds in its store). Broadcasts run on a stream of their own.

Deadlines: nothing in CUDA waits with one, so each broadcast is waited for in a thread; at the deadline the communicator is
aborted, which ends its kernel, hence also that thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from grpo_async.utils.threads import in_thread
from grpo_async.weights.buckets import Staging, TurnBuffers

_NO_WATCHDOG = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class NcclBackend:
    """`Backend` over one NCCL communicator.

    Args:
        group: a process group of this group alone; see `make_nccl_group`.
        timeout_s: deadline of forming the communicator.

    Raises:
        RuntimeError: it did not form.
    """

    sends_in_place = True

    def __init__(self, group: Any, *, device: torch.device, timeout_s: float) -> None:
        self.device = device
        self._group = group
        self._run = _on_own_stream(device)
        self._allocate = partial(torch.empty, dtype=torch.uint8, device=device)
        self._buffers = TurnBuffers(self._allocate)
        self._staging = Staging(device)
        self._landing: torch.Tensor | None = None  # where buckets arrive that are moved to host memory
        self._broadcast(torch.zeros(1, dtype=torch.uint8, device=device), timeout_s=timeout_s)  # forms the communicator

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return self._buffers.take(num_bytes)

    def send(self, buffer: torch.Tensor, *, timeout_s: float) -> None:
        self._broadcast(buffer, timeout_s=timeout_s)

    def expect(self, num_bytes: int) -> None:
        self._staging.expect(num_bytes)
        self._landing = None

    def receive(self, num_bytes: int, *, timeout_s: float) -> torch.Tensor:
        if self._staging.on_device:
            bucket = self._staging.allocate(num_bytes)
            self._broadcast(bucket, timeout_s=timeout_s)
            return bucket
        if self._landing is None or self._landing.numel() < num_bytes:
            self._landing = self._allocate(num_bytes)
        bucket = self._landing[:num_bytes]
        self._broadcast(bucket, timeout_s=timeout_s)
        return self._staging.keep(bucket)

    def close(self) -> None:
        """Aborts the communicator: a broadcast that waits, in any thread, ends."""
        group, self._group = self._group, None
        self._landing = None
        if group is not None:
            group.abort()

    def _broadcast(self, tensor: torch.Tensor, *, timeout_s: float) -> None:
        group = self._group
        if group is None:
            raise RuntimeError("this end of the weight group is closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        done = in_thread(lambda: self._run(lambda: group.broadcast([tensor], options).wait()), name="weights nccl")
        try:
            done.result(timeout=timeout_s)
        except TimeoutError as error:
            self.close()
            raise RuntimeError(
                f"a broadcast of {tensor.numel()} bytes over NCCL did not end within {timeout_s:.0f} s"
            ) from error
        if self._group is None:  # after an abort NCCL's kernel ends without an error
            raise RuntimeError("the weight group was closed during a broadcast over NCCL")


def _on_own_stream(device: torch.device) -> Callable[[Callable[[], object]], None]:
    """Runs work behind what the device was given so far, on a CUDA stream of its own, and blocks until it is done."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(work: Callable[[], object]) -> None:
        with torch.cuda.device(device):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
            stream.synchronize()  # NcclBackend aborts the communicator at its deadline

    return run


def make_nccl_group(store: dist.Store, *, rank: int, world_size: int, timeout_s: float, device: torch.device) -> Any:
    """A NCCL process group of its own. Its communicator forms with the first broadcast."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout_s)  # of torch's watchdog; ours comes first
    prefixed = dist.PrefixStore("nccl", store)
    with torch.cuda.device(device), _environment(_NO_WATCHDOG):
        return dist.ProcessGroupNCCL(prefixed, rank, world_size, options)  # its options have the deadline


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for a moment: the group reads them when it is built, and by default torch's watchdog ends the whole process
    when a broadcast fails. The trainer's own groups keep what they read."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
