"""Buckets in host memory over gloo: a process group of the trainer (rank 0) and the servers' workers alone.

Also carries the signals of the ipc backend. Nothing is pickled, it listens on the own address in the group only, and every wait
has a deadline.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo_async.weights.buckets import TurnBuffers, allocate_on_host
from grpo_async.weights.calls import GroupClosedError

_MAX_MESSAGE_BYTES = 1 << 20


class GlooBackend:
    """`Backend` in host memory.

    Args:
        store: of a rendezvous that has formed.
        address: own address, on which the other members reach this one.

    Raises:
        RuntimeError: a member vanished, or did not connect within `timeout_s`.
    """

    device = torch.device("cpu")
    sends_in_place = True

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, address: str, timeout_s: float) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._threads = (
            1  # broadcasts in their order, so that the deadline of each begins when the one before has ended
        )
        self.rank = rank
        self.world_size = world_size
        self._store: dist.Store | None = store  # the group keeps no reference
        prefixed = dist.PrefixStore("gloo", store)
        self._group: Any = dist.ProcessGroupGloo(prefixed, rank, world_size, options)  # its options have the deadline
        self._buffers = TurnBuffers(allocate_on_host)
        self._works: dict[int, Any] = {}  # broadcasts that nobody has waited for yet
        self._num_started = 0

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return self._buffers.take(num_bytes)

    def send(self, bucket: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        return self._start(bucket, timeout_s=timeout_s)

    def receive(self, num_bytes: int, *, timeout_s: float) -> Callable[[], torch.Tensor]:
        bucket = torch.empty(num_bytes, dtype=torch.uint8)
        wait = self._start(bucket, timeout_s=timeout_s)

        def received() -> torch.Tensor:
            wait()
            return bucket

        return received

    def broadcast(self, buffer: torch.Tensor, *, timeout_s: float) -> None:
        """Send (rank 0) or receive (others) one contiguous CPU tensor.

        Raises:
            RuntimeError: a peer vanished or the deadline passed.
        """
        self._start(buffer, timeout_s=timeout_s)()

    def _start(self, buffer: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        number = self._num_started
        self._num_started += 1
        self._works[number] = self._open().broadcast([buffer], options)
        return lambda: self._wait(number)

    def _wait(self, number: int) -> None:
        if number not in self._works:
            raise GroupClosedError("this end of the weight group is closed")
        self._works.pop(number).wait()  # its options have the deadline

    def broadcast_bytes(self, data: bytes | None, *, timeout_s: float) -> bytes:
        """Send a message of at most a MiB (rank 0), or receive one (others, `data` None).

        Raises:
            RuntimeError: a peer vanished, the deadline passed, or the message is longer.
        """
        length = torch.tensor([len(data or b"")], dtype=torch.int64)
        self.broadcast(length, timeout_s=timeout_s)
        num_bytes = int(length)
        if not 0 <= num_bytes <= _MAX_MESSAGE_BYTES:
            raise RuntimeError(
                f"a message of {num_bytes} bytes in the weight group; at most {_MAX_MESSAGE_BYTES} are accepted"
            )
        body = torch.zeros(num_bytes, dtype=torch.uint8)
        if data is not None:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.broadcast(body, timeout_s=timeout_s)
        return body.numpy().tobytes()

    def confirm(self, *, timeout_s: float) -> None:
        """Return when every member has come to this line.

        Raises:
            RuntimeError: a peer vanished or the deadline passed.
        """
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=timeout_s)
        self._open().allreduce([torch.ones(1, dtype=torch.int32)], options).wait()  # its options have the deadline

    def close(self) -> None:
        """Close the connections, which ends the other members' waiting.

        They live as long as anything refers to the group or to a broadcast. The traceback of one that failed holds this object for
        as long as its error lives, so nothing else does.
        """
        self._group = self._store = None
        self._works.clear()

    def _open(self) -> Any:
        if self._group is None:
            raise GroupClosedError("this end of the weight group is closed")
        return self._group
