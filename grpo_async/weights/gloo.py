"""A gloo group between the trainer (rank 0) and the server's workers, outside torch's default process group.

Used by both ends: the trainer's sender, the embedded engine and the vLLM plugin. Nothing is pickled, the store listens on the
configured address only (a plain TCPStore listens on every interface), and every wait has a deadline.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from grpo_async.weights.buckets import ParameterSpec, cut_into_buckets


class WeightGroup:
    """Membership of one process in the weight group. Build it with `host` (trainer) or `join` (server worker)."""

    def __init__(
        self, store: dist.Store, *, rank: int, world_size: int, address: str, key: str, timeout_s: float
    ) -> None:
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        options._threads = 2
        self._store = store  # the group keeps no reference of its own
        self._group: Any = dist.ProcessGroupGloo(dist.PrefixStore(key, store), rank, world_size, options)

    @classmethod
    def host(cls, listener: socket.socket, *, world_size: int, key: str, timeout_s: float) -> WeightGroup:
        """Rank 0: serves the store on a bound, listening socket (see `listen`) and waits for the other ranks.

        Raises:
            RuntimeError: the other ranks did not join within `timeout_s`.
        """
        address, port = listener.getsockname()[:2]
        store = dist.TCPStore(
            address,
            port,
            world_size,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store owns the descriptor from here
            use_libuv=True,
        )
        return cls(store, rank=0, world_size=world_size, address=address, key=key, timeout_s=timeout_s)

    @classmethod
    def join(
        cls, address: str, port: int, *, rank: int, world_size: int, key: str, timeout_s: float, bind: str | None = None
    ) -> WeightGroup:
        """Rank >= 1: meets the trainer's store. `bind` is the own address of this worker; default: the trainer's address,
        which is right on one machine."""
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
        return cls(store, rank=rank, world_size=world_size, address=bind or address, key=key, timeout_s=timeout_s)

    def broadcast(self, buffer: torch.Tensor, *, timeout_s: float) -> None:
        """Send (rank 0) or receive (others) one contiguous CPU tensor.

        Raises:
            RuntimeError: a peer vanished or the deadline passed.
        """
        options = dist.BroadcastOptions()
        options.rootRank = 0
        options.rootTensor = 0
        options.timeout = timedelta(seconds=timeout_s)
        self._group.broadcast([buffer], options).wait()


def listen(address: str) -> socket.socket:
    """A socket that listens on a free port of `address` only."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, 0))
    listener.listen(128)
    return listener


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Concatenate the bytes of contiguous CPU tensors into one uint8 tensor. Shapes: any -> [num_bytes]."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def unpack(buffer: torch.Tensor, specs: Sequence[ParameterSpec]) -> Iterator[tuple[str, torch.Tensor]]:
    """Cut a received bucket back into named tensors; inverse of `pack`. Views of `buffer` where alignment allows."""
    offset = 0
    for spec in specs:
        part = buffer[offset : offset + spec.num_bytes]
        dtype: torch.dtype = getattr(torch, spec.dtype_name)
        if offset % dtype.itemsize:  # a view of another dtype needs an aligned start
            part = part.clone()
        yield spec.name, part.view(dtype).view(spec.shape)
        offset += spec.num_bytes


def receive_parameters(
    group: WeightGroup, specs: Sequence[ParameterSpec], *, bucket_bytes: int, timeout_s: float
) -> list[tuple[str, torch.Tensor]]:
    """Receive every parameter of `specs` (rank >= 1), each bucket into memory of its own so that views stay valid.

    Raises:
        RuntimeError: the trainer vanished or a bucket did not arrive within `timeout_s`.
    """
    received: list[tuple[str, torch.Tensor]] = []
    for bucket in cut_into_buckets(specs, bucket_bytes):
        buffer = torch.empty(sum(spec.num_bytes for spec in bucket), dtype=torch.uint8)
        group.broadcast(buffer, timeout_s=timeout_s)
        received.extend(unpack(buffer, bucket))
    return received
