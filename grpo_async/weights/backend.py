"""What brings buckets from the trainer (rank 0) to the servers' workers (ranks 1..N): gloo, nccl or ipc behind one protocol.

Both ends of each kind are ours, so that every kind stages an update the same way: nothing is applied before it is complete (vLLM's
own transfer engines load each part as it arrives, and have no deadlines).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from grpo_async.inference.api import TransportKind, WeightInitInfo
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

    def send(self, buffer: torch.Tensor, *, timeout_s: float) -> None:
        """Rank 0: send one packed bucket (see `sends_in_place`); its memory may be reused when this returns.

        Raises:
            RuntimeError: a peer vanished or the deadline passed.
        """

    def expect(self, num_bytes: int) -> None:
        """Other ranks: an update of so many bytes follows; decides where it is staged."""

    def receive(self, num_bytes: int, *, timeout_s: float) -> torch.Tensor:
        """Other ranks: receive one packed bucket into memory of its own, [num_bytes] uint8.

        Raises:
            RuntimeError: the trainer vanished or the deadline passed.
        """

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


def check_device(kind: TransportKind, device: torch.device) -> None:
    """Raises RuntimeError when `kind` is impossible on `device`."""
    if kind != "gloo" and device.type != "cuda":
        raise RuntimeError(f"weights.transport: {kind} needs a GPU, this process has its weights on {device}; set gloo")
    if kind == "nccl" and not dist.is_nccl_available():
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
) -> list[tuple[str, torch.Tensor]]:
    """Receive every parameter of `specs` (rank >= 1), each bucket into memory of its own so that views stay valid.

    On an error the backend is closed.

    Raises:
        RuntimeError: the trainer vanished or a bucket did not arrive within `timeout_s` (message: NOT_ARRIVED), or there was
            no memory for it.
    """
    backend.expect(sum(spec.num_bytes for spec in specs))
    received: list[tuple[str, torch.Tensor]] = []
    for number, bucket in enumerate(cut_into_buckets(specs, bucket_bytes)):
        try:
            buffer = backend.receive(sum(spec.num_bytes for spec in bucket), timeout_s=timeout_s)
        except torch.OutOfMemoryError:  # this worker's own failure
            backend.close()
            raise
        except RuntimeError as error:
            backend.close()  # the members behind this one must not wait for it
            raise RuntimeError(f"{NOT_ARRIVED} (bucket {number}): {error}") from error
        received.extend(unpack(buffer, bucket))
    return received
