"""What brings buckets from the trainer (rank 0) to the servers' workers (ranks 1..N): gloo, nccl or ipc behind one protocol.

    trainer   pack 0 | start sending 0, pack 1 | wait for 0, start sending 1, pack 2 | ...
    worker           | start receiving 0 and 1, wait for 0, load it | start receiving 2, wait for 1, load it | ...

So each end holds two buckets. Deadlines follow the bytes: one for each bucket, from the end of the one before.

Both ends of each transport are ours. vLLM's transfer engines (vllm.distributed.weight_transfer) meet in a store whose contents they
unpickle, wait without a deadline, know neither the CPU nor gloo, and raise in one worker of several, whose executor then takes the
answers of the others for those of later calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from grpo_async.config.base import TransportKind
from grpo_async.inference.api import WeightInitInfo
from grpo_async.utils.network import own_address_towards
from grpo_async.weights.buckets import ParameterSpec, cut_into_buckets, unpack
from grpo_async.weights.calls import NOT_ARRIVED, NOT_FORMED
from grpo_async.weights.gloo import GlooBackend
from grpo_async.weights.ipc import CudaMemory, IpcBackend
from grpo_async.weights.nccl import NcclBackend, make_nccl_group
from grpo_async.weights.rendezvous import device_identity, join_rendezvous


class Backend(Protocol):
    """One end. A backend that raised cannot be used again: close it and form a new group."""

    device: torch.device
    """Where the buckets that are sent have to be."""
    sends_in_place: bool
    """Whether `send` takes any memory on `device`, not only what `buffer` returned."""

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Rank 0: where to pack the next bucket, [num_bytes] uint8 on `device`. Two take turns, so that one may be filled while
        the other is being sent."""

    def send(self, bucket: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        """Rank 0: begin to send one packed bucket (see `sends_in_place`). What this returns waits for the end, `timeout_s` at
        most; before that the bucket's memory is not to be touched. Both raise RuntimeError: a peer vanished, the deadline passed,
        or this end was closed (GroupClosedError)."""

    def receive(self, num_bytes: int, *, timeout_s: float) -> Callable[[], torch.Tensor]:
        """Other ranks: begin to receive one packed bucket into separate memory. What this returns waits for it, `timeout_s` at
        most: [num_bytes] uint8. Both raise RuntimeError as `send`."""

    def close(self) -> None:
        """Leave the group. May be called more than once, and from another thread, which ends what waits where it can."""


def join_backend(info: WeightInitInfo, *, rank: int, device: torch.device) -> Backend:
    """A worker's end (rank >= 1): meet the trainer as `info` says.

    Args:
        device: where the worker's model is.

    Raises:
        RuntimeError: the group did not form within `info.timeout_s`, or this transport is impossible on `device`.
    """
    check_device(info.transport, device)
    store = join_rendezvous(info, rank=rank, device=device_identity(device))
    address = own_address_towards(info.master_address, info.master_port or 1)
    try:
        return build_backend(info, store, rank=rank, address=address, device=device)
    except RuntimeError as error:  # another member is gone since
        raise RuntimeError(f"{NOT_FORMED}: {error}") from error


def check_device(transport: TransportKind, device: torch.device) -> None:
    """Raises RuntimeError when `transport` is impossible on `device`."""
    if transport != "gloo" and device.type != "cuda":
        raise RuntimeError(
            f"weights.transport: {transport} needs a GPU, this process has its weights on {device}; set gloo"
        )
    if transport == "nccl" and not dist.is_nccl_available():
        raise RuntimeError("weights.transport: nccl is not part of this build of torch; set gloo")


def build_backend(info: WeightInitInfo, store: dist.Store, *, rank: int, address: str, device: torch.device) -> Backend:
    """Either end, over the store of a rendezvous that has formed.

    Args:
        address: own address, on which the other members reach this one.

    Raises:
        RuntimeError: the group did not form within `info.timeout_s`.
    """
    if info.transport == "nccl":
        group = make_nccl_group(store, rank=rank, world_size=info.world_size, timeout_s=info.timeout_s, device=device)
        return NcclBackend(group, device=device, timeout_s=info.timeout_s)
    gloo = GlooBackend(store, rank=rank, world_size=info.world_size, address=address, timeout_s=info.timeout_s)
    if info.transport == "ipc":
        return IpcBackend(gloo, memory=CudaMemory(device))
    return gloo


def receive_parameters(
    backend: Backend, specs: Sequence[ParameterSpec], *, bucket_bytes: int, timeout_s: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Receive the parameters of `specs` (rank >= 1), in their order and while they are taken: a bucket is received while the one
    before is being loaded. A tensor may be kept; its bucket's memory stays as long.

    On an error the backend is closed.

    Raises:
        RuntimeError: the trainer vanished or a bucket did not arrive within `timeout_s` (message: NOT_ARRIVED).
        torch.OutOfMemoryError: no memory for a bucket.
    """
    buckets = list(cut_into_buckets(specs, bucket_bytes))

    def begin(number: int) -> Callable[[], torch.Tensor]:
        return backend.receive(sum(spec.num_bytes for spec in buckets[number]), timeout_s=timeout_s)

    ahead = None
    for number, bucket in enumerate(buckets):
        try:
            wait = ahead or begin(number)
            ahead = begin(number + 1) if number + 1 < len(buckets) else None
            buffer = wait()
        except torch.OutOfMemoryError:  # this worker's own failure
            backend.close()
            raise
        except RuntimeError as error:
            backend.close()  # the members behind this one must not wait for it
            raise RuntimeError(f"{NOT_ARRIVED} (bucket {number}): {error}") from error
        yield from unpack(buffer, bucket)
        del buffer, wait  # else it would live on while the next one is loaded
