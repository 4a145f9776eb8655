"""Counts what a training step makes the host wait for: reads of the device's tensors, and collectives. Works on a CPU, too.

On a CPU nothing tells a tensor of the "device" from one of the host. So what comes from the device is followed: the parameters,
what `MicroBatch.to` returns, and every result of an operation with one of them. Reading such a tensor (item, tolist, cpu, numpy,
a truth value, or an operation whose shape depends on values) is what would wait for a GPU. A copy from the host to the device
that is not said to be `non_blocking` from pinned memory waits, too: tests/training/test_step_syncs.py looks at that.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from grpo_async.batching.pack import MicroBatch
from grpo_async.training.token_figures import TokenCollector

_READS = (
    "aten._local_scalar_dense",
    "aten.nonzero",
    "aten.masked_select",
    "aten.unique",
    "aten._unique",
    "aten.equal",
    "aten.is_nonzero",
    "aten.bincount",
    "aten.repeat_interleave.Tensor",
)
"""Operations that read values on the host, or whose result has a shape that depends on values."""

_METHODS = ("tolist", "numpy", "cpu", "__array__")
"""What brings a tensor to the host without an operation of the dispatcher; item() and truth values are `_local_scalar_dense`."""

_LOCAL = ("wait_tensor", "_wrap_tensor_autograd", "barrier")
"""Of the collectives' libraries, but no transfer."""

FSDP = "FSDP"
"""Whose collective it is, where FSDP gathers parameters or reduces gradients; else the function of ours that asked for it."""


class SyncCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """`with count_syncs(policy, optimizer) as counter: train_step(...)`."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reads: Counter[str] = Counter()
        """Reads of the device, by the function of ours that made them."""
        self.collectives: Counter[tuple[str, str]] = Counter()
        """(asked for by, operation) -> how often."""
        self._on_device: dict[int, Any] = {}  # address -> storage, held so that no other gets its address
        self._is_inside = False
        for tensor in tensors:
            self.follow(tensor)

    @property
    def num_reads(self) -> int:
        return self.reads.total()

    @property
    def num_own_collectives(self) -> int:
        """All but FSDP's."""
        return sum(count for (who, _), count in self.collectives.items() if who != FSDP)

    def follow(self, tensor: torch.Tensor) -> None:
        """From here on `tensor` is one of the device."""
        storage = _local(tensor).untyped_storage()
        self._on_device[storage._cdata] = storage

    def is_on_device(self, tensor: torch.Tensor) -> bool:
        return _local(tensor).untyped_storage()._cdata in self._on_device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its local operations come here one by one
        kwargs = kwargs or {}
        name = str(func)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        is_from_device = any(self.is_on_device(tensor) for tensor in tensors)
        if name.startswith(("c10d.", "_c10d_functional.")) and not any(word in name for word in _LOCAL):
            self.collectives[_asked_by(), name.split(".")[1]] += 1
        elif is_from_device and not self._is_inside and _reads(name, args):
            self.reads[f"{_asked_by()}: {name}"] += 1
        output = func(*args, **kwargs)
        if is_from_device and not name.startswith("aten._local_scalar_dense"):
            for leaf in tree_leaves((output, args[0] if args and name.partition(".")[2].endswith("_") else None)):
                if isinstance(leaf, torch.Tensor):
                    self.follow(leaf)
        return output

    def note_method(self, name: str, tensor: torch.Tensor, read: Callable[[], Any]) -> Any:
        """A method that reads `tensor`; the operations it makes itself are not counted again."""
        if self._is_inside or not self.is_on_device(tensor):
            return read()
        self.reads[f"{_asked_by()}: {name}"] += 1
        with self.paused():
            return read()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Reads are not counted."""
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False


@contextmanager
def count_syncs(policy: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[SyncCounter]:
    """Counts within the block. The optimizer's own state is the host's or the device's as torch keeps it on a GPU: the count of
    its steps is the host's unless the optimizer is fused."""
    counter = SyncCounter([*policy.parameters(), *policy.buffers(), *_device_state(optimizer)])
    move = MicroBatch.to

    def moved(batch: MicroBatch, device: torch.device) -> MicroBatch:
        there = move(batch, device)
        values = {field.name: getattr(there, field.name) for field in fields(there) if field.name in _MOVED}
        copies: dict[str, Any] = {k: v.clone() for k, v in values.items() if isinstance(v, torch.Tensor)}
        for copy in copies.values():
            counter.follow(copy)
        return replace(there, **copies)

    on_host = TokenCollector.on_host

    def brought(tokens: TokenCollector) -> torch.Tensor:
        """What a GPU has copied by then, behind the work that the update's own read waited for."""
        with counter.paused():
            return torch.from_numpy(on_host(tokens).numpy().copy())

    with ExitStack() as stack:
        stack.enter_context(patch.object(MicroBatch, "to", moved))
        stack.enter_context(patch.object(TokenCollector, "on_host", brought))
        for name in _METHODS:
            stack.enter_context(patch.object(torch.Tensor, name, _counted(counter, name)))
        stack.enter_context(counter)
        yield counter


_MOVED = {field.name for field in fields(MicroBatch)} - {"host_segment_ids"}


def _counted(counter: SyncCounter, name: str) -> Callable[..., Any]:
    original = getattr(torch.Tensor, name)

    def method(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return counter.note_method(name, tensor, lambda: original(tensor, *args, **kwargs))

    return method


def _device_state(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for name, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor) and (name != "step" or group.get("fused")):
                    yield value


def _reads(name: str, args: Any) -> bool:
    if name.startswith(_READS):
        return True
    if name.startswith(("aten.index.", "aten.index_put")):  # by a mask: how many it picks has to be known
        return any(isinstance(index, torch.Tensor) and index.dtype == torch.bool for index in args[1])
    return False


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _asked_by() -> str:
    """FSDP, or the innermost function of grpo_async on the stack."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if "distributed/fsdp" in file:
            return FSDP
        if "/grpo_async/" in file:
            return f"{file.rpartition('/')[2].removesuffix('.py')}.{frame.f_code.co_name}"
        frame = frame.f_back
    return "elsewhere"
