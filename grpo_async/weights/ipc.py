"""Memory of a GPU that two processes map (CUDA IPC): a trainer rank's buffers, and the handles with which workers open them.

Handles are JSON, checked before they are opened."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

_Number = Annotated[int, Field(ge=0, lt=1 << 48)]
_Bytes = Annotated[bytes, Field(max_length=4096)]


class Handle(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_bytes="hex", val_json_bytes="hex")

    gpu: str = Field(max_length=256)
    handle: _Bytes
    size: _Number
    offset: _Number
    counter: _Bytes
    counter_offset: _Number
    event: _Bytes
    needs_event: bool


Pair = tuple[Handle, Handle]
"""The handles of both buffers, for one process."""
HANDLES: TypeAdapter[list[Pair | None]] = TypeAdapter(list[Pair | None])
"""Those of each worker; None: there is no trainer rank on its GPU."""


class SharedBuffers:
    """Two buffers of [num_bytes] uint8 on `device`, which alternate: workers copy one while the other is filled."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._both = allocate(num_bytes, device), allocate(num_bytes, device)
        self._active = 0

    def pairs(self, num_workers: int) -> Sequence[Pair]:
        """One for each worker: a handle is opened once."""
        first, second = self._both
        return [(handle_of(first), handle_of(second)) for _ in range(num_workers)]

    def next(self, num_bytes: int) -> torch.Tensor:
        self._active = 1 - self._active
        return self._both[self._active][:num_bytes]


def gpu_of(device: torch.device) -> str:
    """The UUID that identifies a GPU in every process: its index depends on CUDA_VISIBLE_DEVICES."""
    return str(torch.cuda.get_device_properties(device).uuid)


def allocate(num_bytes: int, device: torch.device) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)


def handle_of(buffer: torch.Tensor) -> Handle:
    """The handle with which one other process maps `buffer`."""
    storage: Any = buffer.untyped_storage()
    _, *fields = storage._share_cuda_()
    names = [name for name in Handle.model_fields if name != "gpu"]
    return Handle(gpu=gpu_of(buffer.device), **dict(zip(names, fields, strict=True)))


def map_buffer(handle: Handle, device: torch.device) -> torch.Tensor:
    """Map a buffer of another process, [num_bytes] uint8. Raises RuntimeError if it is on another device."""
    if handle.gpu != (own := gpu_of(device)):
        raise RuntimeError(f"the trainer's buffers are on {handle.gpu}, this worker's model is on {own}")
    fields = [getattr(handle, name) for name in Handle.model_fields if name != "gpu"]
    with torch.cuda.device(device):
        storage = torch.UntypedStorage._new_shared_cuda(torch.cuda.current_device(), *fields)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def finish_copies(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def release_mapped() -> None:
    """Return the memory of mappings that nothing refers to any more to the process that shared it."""
    if torch.cuda.is_available():
        torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]
