"""Where the members of a weight group find each other: a TCP store on the trainer, and its word that all may begin.

    trainer   hosts the store ------------ waits for all, looks at their devices ---- "begin", or why not
    worker    says which device it is on - waits for that word

So a group that cannot form (one server refused, two members on one GPU) is called off at once on every member, instead of
each waiting for its own deadline. Nothing is pickled, and the store listens on the given address only (a plain TCPStore
listens on every interface).
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from grpo_async.weights.blame import NOT_FORMED

_BEGIN = "begin"


class CalledOffError(RuntimeError):
    """The meeting was called off with `Meeting.call_off`."""


class Meeting:
    """The trainer's end.

    Args:
        listener: bound, listening socket (see `listen`); handed over.
        key: prefix in the store, new for every meeting.
    """

    def __init__(self, listener: socket.socket, *, world_size: int, key: str, timeout_s: float) -> None:
        self.address, self.port = listener.getsockname()[:2]
        self._world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(
            self.address,
            self.port,
            world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),  # the store owns the descriptor from here
            use_libuv=True,
        )
        self.store: dist.Store = dist.PrefixStore(key, store)
        self._caller = dist.PrefixStore(key, store.clone())  # a store is locked while a thread waits in it
        self._reason = ""

    def wait(self, own_device: str) -> list[str]:
        """Wait for every worker; returns the members' devices by rank.

        Raises:
            CalledOffError: `call_off` was called meanwhile, from another thread.
            RuntimeError: a worker did not come within the time-out; see `missing`.
        """
        workers = [_member(rank) for rank in range(1, self._world_size)]
        self.store.wait(workers, self._timeout)
        if self._reason:
            raise CalledOffError(f"{NOT_FORMED}: {self._reason}")
        return [own_device, *(self.store.get(worker).decode() for worker in workers)]

    def missing(self) -> set[int]:
        """Ranks that have not come yet."""
        return {rank for rank in range(1, self._world_size) if not self._caller.check([_member(rank)])}

    def begin(self) -> None:
        """Let the workers go on."""
        self.store.set(_BEGIN, "")

    def call_off(self, reason: str) -> None:
        """End `wait` and the workers' waiting with an error. Callable from any thread, also more than once."""
        if self._reason:
            return
        self._reason = reason
        absent = self.missing()
        self._caller.set(_BEGIN, reason)
        for rank in absent:
            self._caller.set(_member(rank), "")


def attend(
    address: str, port: int, *, rank: int, world_size: int, key: str, timeout_s: float, device: str
) -> dist.Store:
    """The worker's end (rank >= 1); returns the store when the trainer says that all are there.

    Args:
        device: see `device_identity`.

    Raises:
        RuntimeError: no trainer there, or no word of it within `timeout_s`, or it called the meeting off.
    """
    timeout = timedelta(seconds=timeout_s)
    tcp = dist.TCPStore(address, port, world_size, is_master=False, timeout=timeout, wait_for_workers=False)
    store = dist.PrefixStore(key, tcp)
    store.set(_member(rank), device)
    try:
        reason = store.get(_BEGIN).decode()  # within the store's `timeout`
    except RuntimeError as error:
        raise RuntimeError(f"{NOT_FORMED}: no word of the trainer within {timeout_s:.0f} s: {error}") from error
    if reason:
        raise CalledOffError(f"{NOT_FORMED}, the trainer called it off: {reason}")
    return store


def device_identity(device: torch.device) -> str:
    """What names a device on every process and machine: "cpu", or a GPU's UUID. Its index differs with CUDA_VISIBLE_DEVICES."""
    if device.type == "cpu":
        return "cpu"
    return str(torch.cuda.get_device_properties(device).uuid)


def problem_with_devices(kind: str, devices: Sequence[str]) -> str | None:
    """Why members on these devices (by rank) cannot form a group of this kind, or None."""
    if kind == "gloo":
        return None
    if "cpu" in devices:
        return f"weights.transport: {kind} needs every member on a GPU, {_ranks(devices, 'cpu')} on the CPU; set gloo"
    if kind == "nccl":
        for device in devices:
            if devices.count(device) > 1:
                return f"weights.transport: nccl needs a GPU for each member, {_ranks(devices, device)} both on {device}; set ipc"
    if kind == "ipc":
        for rank, device in enumerate(devices):
            if device != devices[0]:
                return (
                    f"weights.transport: ipc needs all members on one GPU, the trainer is on {devices[0]}, rank {rank} on "
                    f"{device}; set nccl"
                )
    return None


def listen(address: str) -> socket.socket:
    """A socket that listens on a free port of `address` only."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((address, 0))
    listener.listen(128)
    return listener


def _member(rank: int) -> str:
    return f"member/{rank}"


def _ranks(devices: Sequence[str], device: str) -> str:
    """'the trainer and rank 2 are'."""
    names = ["the trainer" if rank == 0 else f"rank {rank}" for rank, other in enumerate(devices) if other == device]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"
