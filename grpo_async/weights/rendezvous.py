"""Where the members of a weight group find each other: a store, in which the trainer says that all may begin.

    trainer   makes the store ------------ waits for all, checks their devices ---- "begin", or why not
    worker    says which device it is on - waits for that answer

So a group that cannot form (one server refused, two members on one GPU) is aborted at once on every member, instead of each waiting
for its own deadline.

A store has no password: who can reach it can read and write it, and so take a member's place. On one machine it is therefore a file
in a folder that only this user may enter; a server writes into what it opens, so it opens only what such a trainer has made.
Between machines it is a TCP store, which listens on the given address only.
Nothing in it is pickled.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
import struct
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_async.config.base import TransportKind
from grpo_async.inference.api import WeightInitInfo
from grpo_async.utils.network import is_loopback, listening_store
from grpo_async.weights.calls import NOT_FORMED

_BEGIN = "begin"
_PREFIX = "grpo-async-weights-"
_NAME = "store"
_FIRST_KEY = b"refcount/"
_MAGIC = struct.pack("=I", len(_FIRST_KEY)) + _FIRST_KEY
"""What torch (2.11 to 2.13) writes first into the file of a FileStore, as it makes it."""


class RendezvousAbortedError(RuntimeError):
    """The rendezvous was ended with `GroupRendezvous.abort`."""


class GroupRendezvous:
    """The trainer's end. `close` it when the group has formed or failed; a group that has formed does not need the store.

    Args:
        address: own address in the group, an IP address; the store is a file where it is a loopback address.
        private: a folder of this user in which the store's own is made; None: the temporary folder.

    Raises:
        OSError, RuntimeError: the store cannot be made.
    """

    def __init__(self, address: str, *, world_size: int, timeout_s: float, private: Path | None = None) -> None:
        self.address, self.port = address, 0
        self.key = f"weights/{secrets.token_hex(8)}"
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._timeout = timedelta(seconds=timeout_s)
        self._folder: Path | None = None
        store: dist.Store
        if is_loopback(address):
            self._folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=private))  # mode 0700
            try:
                store, caller = (_file_store(self.store_file, self._timeout) for _ in range(2))  # makes the file
            except BaseException:
                self.close()
                raise
        else:
            server = listening_store(address, 0, world_size, self._timeout, wait_for_workers=False)
            store, self.port = server, server.port
            caller = server.clone()
        self.store = dist.PrefixStore(self.key, store)
        self._caller = dist.PrefixStore(self.key, caller)  # a store is locked while a thread waits in it
        self._reason = ""

    @property
    def store_file(self) -> str:
        """Empty when the store is reached by TCP."""
        return str(self._folder / _NAME) if self._folder else ""

    def init_info(self, transport: TransportKind, *, rank_offset: int) -> WeightInitInfo:
        """What a server's workers need to join, the first of them as group rank `rank_offset`."""
        return WeightInitInfo(
            transport=transport,
            master_address=self.address,
            master_port=self.port,
            store_file=self.store_file,
            rank_offset=rank_offset,
            world_size=self.world_size,
            timeout_s=self._timeout_s,
            key=self.key,
        )

    def wait(self, own_device: str) -> list[str]:
        """Wait for every worker; returns the members' devices by rank.

        Raises:
            RendezvousAbortedError: `abort` was called meanwhile, from another thread.
            RuntimeError: a worker did not come within the timeout.
        """
        workers = [_member(rank) for rank in range(1, self.world_size)]
        self.store.wait(workers, self._timeout)
        if self._reason:
            raise RendezvousAbortedError(f"{NOT_FORMED}: {self._reason}")
        return [own_device, *(self.store.get(worker).decode() for worker in workers)]

    def begin(self) -> None:
        """Let the workers continue."""
        self.store.set(_BEGIN, "")

    def abort(self, reason: str) -> None:
        """End `wait` and the workers' waiting with an error. Callable from any thread, also more than once."""
        if self._reason:
            return
        self._reason = reason
        absent = [rank for rank in range(1, self.world_size) if not self._caller.check([_member(rank)])]
        self._caller.set(_BEGIN, reason)
        for rank in absent:
            self._caller.set(_member(rank), "")

    def close(self) -> None:
        """Remove the store's file. Whoever waits in it at this moment waits until its own timeout."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)


def join_rendezvous(info: WeightInitInfo, *, rank: int, device: str) -> dist.Store:
    """The worker's end (rank >= 1); returns the store when the trainer says that all are there.

    Args:
        device: see `device_identity`.

    Raises:
        RuntimeError: no trainer there, or no answer of it within `info.timeout_s`, or it aborted, or its file is none.
    """
    problem = problem_with_store(info)
    if problem is not None:
        raise RuntimeError(problem)
    timeout = timedelta(seconds=info.timeout_s)
    if info.store_file:
        store: dist.Store = _file_store(info.store_file, timeout)
    else:
        store = dist.TCPStore(
            info.master_address, info.master_port, info.world_size, is_master=False, timeout=timeout, wait_for_workers=False
        )  # fmt: skip
    store = dist.PrefixStore(info.key, store)
    store.set(_member(rank), device)
    try:
        reason = store.get(_BEGIN).decode()  # within the store's `timeout`
    except RuntimeError as error:
        raise RuntimeError(
            f"{NOT_FORMED}: no answer from the trainer within {info.timeout_s:.0f} s: {error}"
        ) from error
    if reason:
        raise RendezvousAbortedError(f"{NOT_FORMED}, the trainer aborted it: {reason}")
    return store


def problem_with_store(info: WeightInitInfo) -> str | None:
    """Why this process does not open the file that it is to meet the trainer in, or None.

    Opening creates and writes it, so only what a trainer of the same user has made is opened: ".../grpo-async-weights-*/store".
    And FileStore's constructor takes no time limit: it waits for a folder that is missing, or for the rest of what is not a store,
    for minutes and with the interpreter held.
    """
    if not info.store_file:
        return None
    file = Path(info.store_file)
    named = file.is_absolute() and file.name == _NAME and file.parent.name.startswith(_PREFIX)
    if not named or "\0" in info.store_file:
        return f"{file} is not the name of a trainer's store"
    try:
        folder, found = file.parent.lstat(), file.lstat()
        if not stat.S_ISDIR(folder.st_mode) or folder.st_uid != os.geteuid() or folder.st_mode & 0o777 != 0o700:
            return (
                f"{file.parent} is not a private folder of this server's user; run it as the same user as the trainer"
            )
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            return f"{file} is not a file of the user that runs this server"
        with file.open("rb") as stream:
            begins = stream.read(len(_MAGIC))
    except OSError as error:
        return (
            f"this server cannot see the trainer's file {file} ({error.strerror}); run both as the same user on one machine, "
            "or set weights.host to an address of this machine that is not loopback"
        )
    return None if begins == _MAGIC else f"{file} is not a store"


def device_identity(device: torch.device) -> str:
    """What names a device on every process and machine: "cpu", or a GPU's UUID. Its index differs with CUDA_VISIBLE_DEVICES. A GPU
    of two hosts, as $NCCL_HOSTID has it, is two GPUs, as it is for NCCL: so two processes with one GPU can try nccl."""
    if device.type == "cpu":
        return "cpu"
    host = os.environ.get("NCCL_HOSTID")
    return f"{torch.cuda.get_device_properties(device).uuid}{f' of {host}' if host else ''}"


def _file_store(path: str, timeout: timedelta) -> dist.Store:
    store = dist.FileStore(path, -1)  # -1: the store does not remove the file
    store.set_timeout(timeout)
    return store


def _member(rank: int) -> str:
    return f"member/{rank}"
