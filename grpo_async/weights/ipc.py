"""Buckets from a trainer to a worker on the same GPU: two buffers of the trainer, which the worker maps into its own memory.

    trainer   packs into buffer 0/1 - "bucket in 1, 8 MiB" ---------------- waits for all -> the buffer may be filled again
    worker                            maps the buffer once, copies it out - "taken" --'

Signals and handles go over a gloo group, as JSON; nothing is pickled. A handle is sent when a buffer is new, and checked
before it is opened. The GPU is named by its UUID: its index may differ in the two processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from grpo_async.utils.validation import problems_of
from grpo_async.weights.buckets import TurnBuffers
from grpo_async.weights.gloo import GlooBackend
from grpo_async.weights.rendezvous import device_identity

_Number = Annotated[int, Field(ge=0, lt=1 << 48)]
_Bytes = Annotated[bytes, Field(max_length=4096)]


class _Message(BaseModel):
    """What travels as JSON; bytes in hexadecimal."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_bytes="hex", val_json_bytes="hex")


class Handle(_Message):
    """What maps a buffer of another process: the UUID of its GPU, and the fields of torch's `_share_cuda_`."""

    device: str = Field(max_length=256)
    handle: _Bytes
    size: _Number
    offset: _Number
    counter: _Bytes
    counter_offset: _Number
    event: _Bytes
    needs_event: bool


class Signal(_Message):
    """The trainer says that a bucket is in a buffer. `handles`: one for each worker, where the buffer is new."""

    buffer: int = Field(ge=0, le=1)
    num_bytes: int
    handles: list[Handle] | None


class CudaMemory:
    """Memory of a GPU that another process can map: CUDA IPC as torch does it, without its pickling."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Memory that can be shared, [num_bytes] uint8."""
        return torch.empty(num_bytes, dtype=torch.uint8, device=self.device)

    def share(self, buffer: torch.Tensor) -> Handle:
        """What one other process needs to map `buffer`. Call it once for each."""
        storage: Any = buffer.untyped_storage()
        _, handle, size, offset, counter, counter_offset, event, needs_event = storage._share_cuda_()
        return Handle(
            device=device_identity(self.device),
            handle=handle,
            size=size,
            offset=offset,
            counter=counter,
            counter_offset=counter_offset,
            event=event,
            needs_event=needs_event,
        )

    def open(self, handle: Handle) -> torch.Tensor:
        """Map a buffer of another process, [num_bytes] uint8. Raises RuntimeError: it is not on the own device."""
        own = device_identity(self.device)
        if handle.device != own:
            raise RuntimeError(
                f"the trainer's buffers are on {handle.device}, this worker's model is on {own}; set weights.transport: nccl"
            )
        fields = [getattr(handle, name) for name in Handle.model_fields if name != "device"]  # in torch's order
        with torch.cuda.device(self.device):
            storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *fields)
        return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage)

    def release(self) -> None:
        """Give back what was shared or mapped and has no reference anymore."""
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


class IpcBackend:
    """`Backend` by shared device memory."""

    sends_in_place = False

    def __init__(self, group: GlooBackend, *, memory: CudaMemory) -> None:
        self.device = memory.device
        self._group = group
        self._memory = memory
        self._buffers = TurnBuffers(memory.allocate)
        # trainer: buffers as they were shared; worker: mapped ones
        self._known: list[torch.Tensor | None] = [None, None]

    def buffer(self, num_bytes: int) -> torch.Tensor:
        return self._buffers.take(num_bytes)

    def send(self, bucket: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        group = self._group
        number, whole = self._buffers.find(bucket)
        handles = None
        if self._known[number] is not whole:
            handles = [self._memory.share(whole) for _ in range(1, group.world_size)]  # one for each worker
            self._known[number] = whole
        signal = Signal(buffer=number, num_bytes=bucket.numel(), handles=handles)
        self._finish_copies()  # the bucket is packed before it is announced
        group.broadcast_bytes(signal.model_dump_json().encode(), timeout_s=timeout_s)
        return lambda: group.confirm(timeout_s=timeout_s)  # all have copied it out

    def receive(self, num_bytes: int, *, timeout_s: float) -> Callable[[], torch.Tensor]:
        return lambda: self._receive(num_bytes, timeout_s=timeout_s)

    def _receive(self, num_bytes: int, *, timeout_s: float) -> torch.Tensor:
        group = self._group
        body = group.broadcast_bytes(None, timeout_s=timeout_s)
        try:
            signal = Signal.model_validate_json(body)
        except ValidationError as error:
            raise RuntimeError(f"not a signal of the trainer: {problems_of(error)}") from error
        if signal.num_bytes != num_bytes:
            raise RuntimeError(f"the trainer sent {signal.num_bytes} bytes, but {num_bytes} were expected")
        if signal.handles is not None:
            if len(signal.handles) != group.world_size - 1:
                raise RuntimeError(f"{len(signal.handles)} memory handles for {group.world_size - 1} workers")
            self._known[signal.buffer] = None  # the one before, if any, is unmapped first
            self._known[signal.buffer] = self._memory.open(signal.handles[group.rank - 1])
        mapped = self._known[signal.buffer]
        if mapped is None or mapped.numel() < num_bytes:
            raise RuntimeError(
                f"the trainer refers to buffer {signal.buffer}, which it has not shared with {num_bytes} bytes"
            )
        bucket = self._copy(mapped[:num_bytes])  # vLLM keeps what belongs to a layer until it has all of it
        self._finish_copies()
        group.confirm(timeout_s=timeout_s)
        return bucket

    def _copy(self, bucket: torch.Tensor) -> torch.Tensor:
        return bucket.clone()

    def _finish_copies(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        self._group.close()
        self._buffers = TurnBuffers(self._memory.allocate)
        self._known = [None, None]
        self._memory.release()
