"""Buckets from a trainer to a worker on the same GPU: two buffers of the trainer, which the worker maps into its own memory.

    trainer   packs into buffer 0/1 - "bucket in 1, 8 MiB" ---------------- waits for all -> the buffer may be filled again
    worker                            maps the buffer once, copies it out - "taken" --'

Signals and handles go over a gloo group, as JSON; nothing is pickled. A handle is sent when a buffer is new and looked at
before it is opened. The GPU is named by its UUID: its index may differ in the two processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import torch

from grpo_async.weights.gloo import WeightGroup
from grpo_async.weights.rendezvous import device_identity
from grpo_async.weights.staging import Staging

_MAX_SIGNAL_BYTES = 1 << 20
_MAX_HANDLE_BYTES = 4096
_NUM_BUFFERS = 2

Handle = Mapping[str, Any]


class SharedMemory(Protocol):
    """Memory of a device that another process can map."""

    device: torch.device

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory that can be shared, [num_bytes] uint8."""

    def share(self, buffer: torch.Tensor) -> Handle:
        """What one other process needs to map `buffer`, fit for JSON. Call it once for each."""

    def open(self, handle: Handle) -> torch.Tensor:
        """Map a buffer of another process, [num_bytes] uint8. Raises RuntimeError."""

    def release(self) -> None:
        """Give back what was shared or mapped and has no reference any more."""


class CudaMemory:
    """CUDA IPC as torch does it, without its pickling."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def share(self, buffer: torch.Tensor) -> Handle:
        _, handle, size, offset, counter, counter_offset, event, needs_event = _share(buffer)
        return {
            "device": device_identity(self.device),
            "handle": handle.hex(),
            "size": size,
            "offset": offset,
            "counter": counter.hex(),
            "counter_offset": counter_offset,
            "event": event.hex(),
            "needs_event": needs_event,
        }

    def open(self, handle: Handle) -> torch.Tensor:
        fields = check_handle(handle, device=device_identity(self.device))
        with torch.cuda.device(self.device):
            storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *fields)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def release(self) -> None:
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _share(buffer: torch.Tensor) -> tuple[int, bytes, int, int, bytes, int, bytes, bool]:
    shared: tuple[int, bytes, int, int, bytes, int, bytes, bool] = buffer.untyped_storage()._share_cuda_()  # type: ignore[no-untyped-call]
    return shared


def check_handle(handle: Handle, *, device: str) -> tuple[bytes, int, int, bytes, int, bytes, bool]:
    """The arguments of torch's `_new_shared_cuda` behind the device's index.

    Args:
        device: identity of the own device.

    Raises:
        RuntimeError: a field is missing, of another type, too long, or of another device.
    """
    kinds: dict[str, type] = {
        "device": str, "handle": str, "size": int, "offset": int, "counter": str, "counter_offset": int, "event": str,
        "needs_event": bool,
    }  # fmt: skip
    if set(handle) != set(kinds):
        raise RuntimeError(f"a memory handle has the fields {sorted(handle)}, not {sorted(kinds)}")
    for name, kind in kinds.items():
        value = handle[name]
        if type(value) is not kind:
            raise RuntimeError(f"field {name} of a memory handle is {type(value).__name__}, not {kind.__name__}")
        if isinstance(value, int) and not 0 <= value < 1 << 48:
            raise RuntimeError(f"field {name} of a memory handle is {value}")
        if isinstance(value, str) and len(value) > 2 * _MAX_HANDLE_BYTES:
            raise RuntimeError(f"field {name} of a memory handle has {len(value)} characters")
    if handle["device"] != device:
        raise RuntimeError(
            f"the trainer's buffers are on {handle['device']}, this worker's model is on {device}; set weights.transport: nccl"
        )
    try:
        return (
            bytes.fromhex(handle["handle"]),
            handle["size"],
            handle["offset"],
            bytes.fromhex(handle["counter"]),
            handle["counter_offset"],
            bytes.fromhex(handle["event"]),
            handle["needs_event"],
        )
    except ValueError as error:
        raise RuntimeError(f"a memory handle is not hexadecimal: {error}") from error


class IpcBackend:
    """`Backend` by shared device memory."""

    sends_in_place = False

    def __init__(self, group: WeightGroup, *, memory: SharedMemory, staging: Staging | None = None) -> None:
        self.device = memory.device
        self._group = group
        self._memory = memory
        self._staging = staging or Staging(memory.device)
        self._buffers: list[torch.Tensor | None] = [None] * _NUM_BUFFERS  # the trainer's own; a worker: mapped ones
        self._unsent: set[int] = set()  # buffers whose handles no worker has yet
        self._turn = 0

    def buffer(self, num_bytes: int) -> torch.Tensor:
        self._turn = (self._turn + 1) % _NUM_BUFFERS
        buffer = self._buffers[self._turn]
        if buffer is None or buffer.numel() < num_bytes:
            buffer = self._memory.allocate(num_bytes)
            self._buffers[self._turn] = buffer
            self._unsent.add(self._turn)
        return buffer[:num_bytes]

    def send(self, buffer: torch.Tensor, *, timeout_s: float) -> None:
        group = self._group
        index = self._index_of(buffer)
        signal: dict[str, Any] = {"buffer": index, "num_bytes": buffer.numel(), "handles": None}
        if index in self._unsent:
            whole = self._buffers[index]
            assert whole is not None
            signal["handles"] = [self._memory.share(whole) for _ in range(1, group.world_size)]  # one for each worker
            self._unsent.discard(index)
        group.broadcast_bytes(json.dumps(signal).encode(), timeout_s=timeout_s, max_bytes=_MAX_SIGNAL_BYTES)
        group.confirm(timeout_s=timeout_s)  # all have copied it out

    def expect(self, num_bytes: int) -> None:
        self._staging.expect(num_bytes)

    def receive(self, num_bytes: int, *, timeout_s: float) -> torch.Tensor:
        group = self._group
        signal = _read_signal(
            group.broadcast_bytes(None, timeout_s=timeout_s, max_bytes=_MAX_SIGNAL_BYTES), num_bytes=num_bytes
        )
        index = signal["buffer"]
        if signal["handles"] is not None:
            if len(signal["handles"]) != group.world_size - 1:
                raise RuntimeError(f"{len(signal['handles'])} memory handles for {group.world_size - 1} workers")
            self._buffers[index] = None  # the one before, if any, is unmapped first
            self._buffers[index] = self._memory.open(signal["handles"][group.rank - 1])
        mapped = self._buffers[index]
        if mapped is None or mapped.numel() < num_bytes:
            raise RuntimeError(f"the trainer speaks of buffer {index} with {num_bytes} bytes, which it has not shared")
        bucket = self._staging.keep(mapped[:num_bytes])
        group.confirm(timeout_s=timeout_s)
        return bucket

    def close(self) -> None:
        self._group.close()
        self._buffers = [None] * _NUM_BUFFERS
        self._memory.release()

    def _index_of(self, buffer: torch.Tensor) -> int:
        for index, own in enumerate(self._buffers):
            if own is not None and own.data_ptr() == buffer.data_ptr():
                return index
        raise RuntimeError("only buffers that `buffer` returned can be sent")


def _read_signal(body: bytes, *, num_bytes: int) -> dict[str, Any]:
    """Raises RuntimeError when it is not a signal for a bucket of `num_bytes`."""
    try:
        signal = json.loads(body)
    except ValueError as error:
        raise RuntimeError(f"the trainer's signal is not JSON: {error}") from error
    if not isinstance(signal, dict) or set(signal) != {"buffer", "num_bytes", "handles"}:
        raise RuntimeError(f"not a signal of the trainer: {body[:200]!r}")
    if type(signal["buffer"]) is not int or not 0 <= signal["buffer"] < _NUM_BUFFERS:
        raise RuntimeError(f"the trainer has no buffer {signal['buffer']!r}")
    if type(signal["num_bytes"]) is not int or signal["num_bytes"] != num_bytes:
        raise RuntimeError(f"the trainer sends {signal['num_bytes']!r} bytes, {num_bytes} are expected")
    handles = signal["handles"]
    if handles is not None and not (isinstance(handles, list) and all(isinstance(handle, dict) for handle in handles)):
        raise RuntimeError("the trainer's memory handles are not a list of handles")
    return signal
