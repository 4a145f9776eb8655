"""Transfers buckets from the trainer (rank 0) to the servers' workers (ranks 1..N): the rendezvous, then gloo, NCCL or CUDA IPC.

    trainer   pack 0 | start sending 0, pack 1 | wait for 0, start sending 1, pack 2 | ...
    worker           | start receiving 0 and 1, wait for 0, load it | start receiving 2, wait for 1, load it | ...

Each end holds two buckets, each with its own deadline. Members meet in a TCP store that listens only on the trainer's address,
under a random key; nothing in it is unpickled. (vLLM's transfer engines unpickle, wait without a deadline, and support neither the
CPU nor gloo.) A group that cannot form is aborted on all members at once."""

from __future__ import annotations

import os
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from pydantic import ValidationError

from grpo_async.config.base import TransportKind
from grpo_async.inference.api import WeightInitInfo
from grpo_async.utils.concurrency import in_thread
from grpo_async.utils.network import listening_store, own_address_towards
from grpo_async.utils.validation import problems_of
from grpo_async.weights import ipc

NOT_FORMED = "the weight group did not form"
"""Part of the error of a member that joined, but whose group was aborted or incomplete."""


class GroupClosedError(RuntimeError):
    """This end of the weight group is closed: nothing more can be sent or received over it."""

    def __init__(self, message: str = "this end of the weight group is closed") -> None:
        super().__init__(message)


# ---- the rendezvous ----


class Rendezvous:
    """The trainer's end of the rendezvous; `address` is the trainer's in the group."""

    def __init__(self, address: str, *, world_size: int, timeout_s: float) -> None:
        self._info = {"master_address": address, "world_size": world_size, "timeout_s": timeout_s}
        self._key = f"weights/{secrets.token_hex(16)}"
        server = listening_store(address, 0, world_size, timedelta(seconds=timeout_s), wait_for_workers=False)
        self._port = server.port
        self._store = dist.PrefixStore(self._key, server)
        self._other = dist.PrefixStore(self._key, server.clone())  # a client is locked while a thread waits in it

    def init_info(self, transport: TransportKind, *, rank_offset: int) -> WeightInitInfo:
        """The information with which a server's workers join; its first worker has group rank `rank_offset`."""
        return WeightInitInfo(
            transport=transport, master_port=self._port, key=self._key, rank_offset=rank_offset, **self._info
        )

    def join(self, transport: TransportKind, device: torch.device) -> Backend:
        return _form_group(self.init_info(transport, rank_offset=1), self._store, rank=0, device=device)

    def abort(self, reason: str) -> None:
        """End the wait of all members with an error. Thread-safe; may be called more than once."""
        self._other.compare_set("begin", "", reason)


def join_group(info: WeightInitInfo, *, rank: int, device: torch.device) -> Backend:
    """Join the trainer's group from a worker (rank >= 1), as `info` says; `device` is that of the worker's model."""
    check_device(info.transport, device)
    timeout = timedelta(seconds=info.timeout_s)
    store = dist.TCPStore(
        info.master_address, info.master_port, info.world_size, is_master=False, timeout=timeout, wait_for_workers=False
    )  # fmt: skip
    return _form_group(info, dist.PrefixStore(info.key, store), rank=rank, device=device)


def check_device(transport: TransportKind, device: torch.device) -> None:
    if transport != "gloo" and device.type != "cuda":
        raise RuntimeError(
            f"weights.transport: {transport} needs a GPU, this process has its weights on {device}; set gloo"
        )
    if transport == "nccl" and not dist.is_nccl_available():
        raise RuntimeError("weights.transport: nccl is not part of this build of torch; set gloo")


def _form_group(info: WeightInitInfo, store: dist.Store, *, rank: int, device: torch.device) -> Backend:
    """Form the group, on either end: wait until all members are there, or one of them has failed."""
    try:
        if store.add("arrived", 1) == info.world_size:
            store.compare_set("begin", "", "all are here")
        if (reason := store.get("begin").decode()) != "all are here":  # within the store's timeout
            raise RuntimeError(reason)
        if info.transport == "nccl":
            return NcclBackend(_nccl_group(store, info, rank, device), device=device, timeout_s=info.timeout_s)
        address = info.master_address if rank == 0 else own_address_towards(info.master_address, info.master_port)
        gloo = GlooBackend(store, rank=rank, world_size=info.world_size, address=address, timeout_s=info.timeout_s)
        return IpcBackend(gloo, store, device=device) if info.transport == "ipc" else gloo
    except RuntimeError as error:
        raise RuntimeError(f"{NOT_FORMED}: {error}") from error


# ---- backends ----


class Backend(ABC):
    """One end of a group that has formed, for buckets on `device`. After an error: close it and form a new group."""

    sends_in_place = True
    """Whether `send` accepts any memory on `device`, not only a tensor from `buffer`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers: list[torch.Tensor | None] = [None, None]
        self._active = 0  # index of the buffer that was packed or mapped last

    def buffer(self, num_bytes: int) -> torch.Tensor:
        """Rank 0: memory for the next bucket, [num_bytes] uint8 on `device`. Two buffers alternate, so that one may be filled
        while the other is being sent; they grow to the largest bucket."""
        self._active = 1 - self._active
        buffer = self._buffers[self._active]
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._buffers[self._active] = self._allocate(num_bytes)
        return buffer[:num_bytes]

    @abstractmethod
    def send(self, bucket: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        """Rank 0: begin to send one packed bucket (see `sends_in_place`). The returned function waits for the end, at most
        `timeout_s`; until then the bucket's memory must not be touched. Both raise RuntimeError if a peer vanished, the deadline
        passed, or this end was closed (GroupClosedError)."""

    @abstractmethod
    def receive(self, num_bytes: int, *, timeout_s: float) -> Callable[[], torch.Tensor]:
        """Other ranks: begin to receive one packed bucket into separate memory. The returned function waits for it, at most
        `timeout_s`, and returns [num_bytes] uint8. Both raise RuntimeError like `send`."""

    @abstractmethod
    def close(self) -> None:
        """Leave the group. May be called repeatedly and from another thread; it ends waits where the backend can."""

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)


class _BroadcastBackend(Backend):
    def send(self, bucket: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        return self._broadcast(bucket, timeout_s=timeout_s)

    def receive(self, num_bytes: int, *, timeout_s: float) -> Callable[[], torch.Tensor]:
        bucket = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        wait = self._broadcast(bucket, timeout_s=timeout_s)

        def received() -> torch.Tensor:
            wait()
            return bucket

        return received

    @abstractmethod
    def _broadcast(self, tensor: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        """Begin to send (rank 0) or receive (others). The returned function waits for the end."""


class GlooBackend(_BroadcastBackend):
    """Buckets in host memory, over a process group of only the trainer and the servers' workers, that listens only on `address`."""

    def __init__(self, store: dist.Store, *, rank: int, world_size: int, address: str, timeout_s: float) -> None:
        super().__init__(torch.device("cpu"))
        options = dist.ProcessGroupGloo._Options()
        options._timeout = timedelta(seconds=timeout_s)
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        # one thread keeps broadcasts in order, so that each deadline begins when the previous broadcast has ended
        options._threads = 1
        self.rank, self.world_size = rank, world_size
        self._store: dist.Store | None = store  # the group keeps no reference
        prefixed = dist.PrefixStore("gloo", store)
        self._group: Any = dist.ProcessGroupGloo(prefixed, rank, world_size, options)  # its options have the deadline
        self._works: dict[int, Any] = {}  # broadcasts that nobody has waited for yet
        self._num_started = 0

    def confirm(self, *, timeout_s: float) -> None:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=timeout_s)
        self._open().allreduce([torch.ones(1, dtype=torch.int32)], options).wait()  # its options have the deadline

    def send_to(self, rank: int, tensor: torch.Tensor, *, timeout_s: float) -> Callable[[], object]:
        """Begin to send to one worker. The returned function waits for the end."""
        return partial(self._open().send([tensor], rank, 0).wait, timedelta(seconds=timeout_s))

    def receive_from_trainer(self, num_bytes: int, *, timeout_s: float) -> torch.Tensor:
        bucket = self._allocate(num_bytes)
        self._open().recv([bucket], 0, 0).wait(timedelta(seconds=timeout_s))
        return bucket

    def close(self) -> None:
        """Close the connections, which ends the other members' waits. They stay open as long as anything refers to the group or
        to a broadcast, and the traceback of a failed one keeps this object alive: so nothing but this object may refer to
        them."""
        self._group = self._store = None
        self._works.clear()

    def _allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())

    def _broadcast(self, tensor: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        number, self._num_started = self._num_started, self._num_started + 1
        self._works[number] = self._open().broadcast([tensor], _from_rank_0(timeout_s))

        def wait() -> None:
            try:
                self._works.pop(number).wait()  # its options have the deadline
            except KeyError as error:
                raise GroupClosedError from error

        return wait

    def _open(self) -> Any:
        if (group := self._group) is None:  # read once: `close` may come from another thread
            raise GroupClosedError
        return group


class NcclBackend(_BroadcastBackend):
    """Buckets between GPUs, over an NCCL communicator outside torch's default process group, on NCCL's own stream. A wait with a
    limit aborts the communicator when it has passed. Forming it has no such limit, so a separate thread does it."""

    def __init__(self, group: Any, *, device: torch.device, timeout_s: float) -> None:
        super().__init__(device)
        self._group = group
        first = torch.zeros(1, dtype=torch.uint8, device=device)
        formed = in_thread(lambda: self._broadcast(first, timeout_s=timeout_s)(), name="weights nccl")
        try:
            formed.result(timeout=timeout_s)
        except TimeoutError as error:
            self.close()
            raise RuntimeError(f"the NCCL communicator did not form within {timeout_s:.0f} s") from error

    def close(self) -> None:
        """Abort the communicator: a broadcast that waits, in any thread, ends."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()

    def _broadcast(self, tensor: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        group = self._group
        if group is None:
            raise GroupClosedError
        with torch.cuda.device(self.device):
            # ordered after the work that is already on the current stream
            work = group.broadcast([tensor], _from_rank_0(timeout_s))
        started = time.monotonic()

        def wait() -> None:
            # torch counts from the start, but the previous bucket may have been in transit until now
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


def _nccl_group(store: dist.Store, info: WeightInitInfo, rank: int, device: torch.device) -> Any:
    """A separate NCCL process group, which gets NCCL's id from the store as bytes. Its communicator forms at the first
    broadcast."""
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * info.timeout_s)  # for torch's watchdog; our own limit comes first
    prefixed = dist.PrefixStore("nccl", store)
    with torch.cuda.device(device), _without_watchdog():
        return dist.ProcessGroupNCCL(prefixed, rank, info.world_size, options)  # its options have the deadline


@contextmanager
def _without_watchdog() -> Iterator[None]:
    """Disable torch's watchdog for a group that is built inside: by default it ends the whole process when a broadcast fails. The
    group reads these variables when it is built; the trainer's own groups keep their settings."""
    variables = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
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


def _from_rank_0(timeout_s: float) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    options.timeout = timedelta(seconds=timeout_s)
    return options


# ---- CUDA IPC ----


class IpcBackend(Backend):
    """Buckets from trainer ranks to workers on the same GPUs: each worker maps the two buffers of the rank on its GPU.

        trainer ranks   pack into buffer 0/1 - "it is there" ---------- wait for all -> the buffer may be filled again
        worker                                 copies it out - "taken" --'

    Both signals are a barrier of a gloo group of rank 0 and the workers. The other trainer ranks are not in it: they fill their
    buffers in step with rank 0 (see push.hand_over). Workers on other GPUs get the bucket from rank 0 over gloo."""

    sends_in_place = False

    def __init__(self, group: GlooBackend, store: dist.Store, *, device: torch.device) -> None:
        super().__init__(device)
        self._group = group
        self._store: dist.Store | None = store
        self._own: ipc.SharedBuffers | None = None  # of the trainer
        self._elsewhere: Sequence[int] = ()  # workers on other GPUs
        self._mapped: Sequence[torch.Tensor] | None = None  # of a worker
        if group.rank > 0:
            store.set(f"gpu {group.rank}", ipc.gpu_of(device))

    @property
    def is_shared(self) -> bool:
        return self._own is not None

    def worker_gpus(self) -> list[str]:
        """Rank 0: the GPU of each worker, in their order. Raises RuntimeError at the deadline of the store."""
        store = self._open()
        return [store.get(f"gpu {rank}").decode() for rank in range(1, self._group.world_size)]

    def share(self, num_bytes: int, others: Iterable[ipc.Pair]) -> None:
        """Rank 0: share buffers for buckets of up to `num_bytes` with the workers, its own and those of `others`, the ranks on
        their GPUs. Raises RuntimeError if no worker shares a GPU."""
        workers, own = self.worker_gpus(), ipc.gpu_of(self.device)
        self._own = ipc.SharedBuffers(self.device, num_bytes)
        pairs = [*self._own.pairs(workers.count(own)), *others]
        chosen = []
        for gpu in workers:
            found = next((pair for pair in pairs if pair[0].gpu == gpu), None)
            if found is not None:
                pairs.remove(found)
            chosen.append(found)
        if not any(chosen):
            raise RuntimeError(
                f"no rank of the trainer is on a server's GPU ({', '.join(workers)}); set weights.transport: nccl"
            )
        self._elsewhere = [rank for rank, pair in enumerate(chosen, 1) if pair is None]
        self._open().set("handles", ipc.HANDLES.dump_json(chosen).decode())

    def buffer(self, num_bytes: int) -> torch.Tensor:
        if self._own is None:
            raise GroupClosedError
        return self._own.next(num_bytes)

    def send(self, bucket: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        group = self._group
        ipc.finish_copies(self.device)  # the bucket must be packed before it is announced
        on_host = bucket.cpu() if self._elsewhere else None
        group.confirm(timeout_s=timeout_s)
        sends = [group.send_to(rank, on_host, timeout_s=timeout_s) for rank in self._elsewhere if on_host is not None]

        def wait() -> None:
            for sent in sends:
                sent()
            group.confirm(timeout_s=timeout_s)  # returns when all workers have copied it

        return wait

    def receive(self, num_bytes: int, *, timeout_s: float) -> Callable[[], torch.Tensor]:
        return lambda: self._receive(num_bytes, timeout_s=timeout_s)

    def _receive(self, num_bytes: int, *, timeout_s: float) -> torch.Tensor:
        group = self._group
        self._active = 1 - self._active
        group.confirm(timeout_s=timeout_s)
        buffers = self._map()
        if not buffers:
            bucket = group.receive_from_trainer(num_bytes, timeout_s=timeout_s).to(self.device)
        elif buffers[self._active].numel() < num_bytes:
            raise RuntimeError(f"the trainer's buffer has less than the {num_bytes} bytes of this bucket")
        else:
            bucket = buffers[self._active][:num_bytes].clone()  # vLLM keeps tensors of a layer until it has all of them
        ipc.finish_copies(self.device)
        group.confirm(timeout_s=timeout_s)
        return bucket

    def _map(self) -> Sequence[torch.Tensor]:
        if self._mapped is None:
            try:
                pairs = ipc.HANDLES.validate_json(self._open().get("handles"))
            except ValidationError as error:
                raise RuntimeError(f"these are no handles of the trainer: {problems_of(error)}") from error
            if len(pairs) != self._group.world_size - 1:
                raise RuntimeError(
                    f"these are no handles of the trainer: {len(pairs)} for {self._group.world_size - 1} workers"
                )
            self._mapped = [ipc.map_buffer(handle, self.device) for handle in pairs[self._group.rank - 1] or ()]
        return self._mapped

    def close(self) -> None:
        self._group.close()
        self._store = self._own = self._mapped = None
        ipc.release_mapped()

    def _open(self) -> dist.Store:
        if (store := self._store) is None:
            raise GroupClosedError
        return store
