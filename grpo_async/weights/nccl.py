"""Buckets between GPUs over NCCL: a communicator of the weight group alone, outside torch's default process group.

torch's ProcessGroupNCCL over the store of the rendezvous; it takes NCCL's id from there as bytes (vLLM's own group unpickles what
it finds in its store). Broadcasts run on NCCL's own stream.

Deadlines: `wait` with a time limit holds this thread until the broadcast has ended, and aborts the communicator when the limit has
passed or NCCL reports an error. To form the communicator has no such limit, so that is done in a thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from grpo_async.utils.concurrency import in_thread
from grpo_async.weights.buckets import TurnBuffers
from grpo_async.weights.calls import GroupClosedError

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
        self._allocate = partial(torch.empty, dtype=torch.uint8, device=device)
        self._buffers = TurnBuffers(self._allocate)
        first = torch.zeros(1, dtype=torch.uint8, device=device)
        formed = in_thread(lambda: self._start(first, timeout_s=timeout_s)(), name="weights nccl")
        try:
            formed.result(timeout=timeout_s)
        except TimeoutError as error:
            self.close()
            raise RuntimeError(f"the NCCL communicator did not form within {timeout_s:.0f} s") from error

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return self._buffers.take(num_bytes)

    def send(self, bucket: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        return self._start(bucket, timeout_s=timeout_s)

    def receive(self, num_bytes: int, *, timeout_s: float) -> Callable[[], torch.Tensor]:
        bucket = self._allocate(num_bytes)
        wait = self._start(bucket, timeout_s=timeout_s)

        def received() -> torch.Tensor:
            wait()
            return bucket

        return received

    def close(self) -> None:
        """Aborts the communicator: a broadcast that waits, in any thread, ends."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _start(self, tensor: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        group = self._group
        if group is None:
            raise GroupClosedError("this end of the weight group is closed")
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        with torch.cuda.device(self.device):
            work = group.broadcast([tensor], options)  # behind what the current stream was given so far
        started = time.monotonic()

        def wait() -> None:
            # torch counts from the start; the bucket before may have been on its way until now
            limit_s = time.monotonic() - started + timeout_s
            try:
                with torch.cuda.device(self.device):
                    work.wait(timedelta(seconds=limit_s))
            except RuntimeError as error:
                self.close()
                raise RuntimeError(
                    f"a broadcast of {tensor.numel()} bytes over NCCL failed, or did not end within {timeout_s:.0f} s: {error}"
                ) from error
            if self._group is None:  # after an abort NCCL's kernel ends without an error
                raise GroupClosedError("the weight group was closed during a broadcast over NCCL")

        return wait


def make_nccl_group(store: dist.Store, *, rank: int, world_size: int, timeout_s: float, device: torch.device) -> Any:
    """A separate NCCL process group. Its communicator forms with the first broadcast."""
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
