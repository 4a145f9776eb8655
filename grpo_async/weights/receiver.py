"""New weights on their way into one worker of a server: membership of the weight group, and what is staged.

    join -> drop (an update starts) -> receive -> take

Nothing here touches what is served: `take` hands the whole staged update over, to be loaded between two steps of the engine.

Joining and receiving wait for the trainer, so each is started by one call and waited for in a thread, by what that call returns. A
trainer that starts anew never waits for what an earlier one left: every call has a number, and the end of an older one counts for
nothing. An update that fails takes its group with it: the members may then disagree about the next broadcast, and the trainer's
wait ends with the connection.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence

import torch

from grpo_async.errors import GrpoAsyncError
from grpo_async.inference.api import AdapterBase, WeightInitInfo, WeightUpdateInfo
from grpo_async.utils.threads import in_thread
from grpo_async.weights.adapters import BaseWeights
from grpo_async.weights.backend import Backend, join_backend, receive_parameters
from grpo_async.weights.buckets import ITEM_SIZES, ParameterSpec
from grpo_async.weights.rendezvous import problem_with_store

Named = list[tuple[str, torch.Tensor]]

_NO_GROUP = "there is no weight group, or a failed update ended it; call /init_weight_transfer_engine first"
_REPLACED = "another weight update began in the meantime"


class UpdateRefusedError(GrpoAsyncError):
    """The update does not fit the served model, or comes out of order. The old weights stay."""


class UpdateFailedError(GrpoAsyncError):
    """The group did not form, or the trainer vanished on the way. The old weights stay."""


class UpdateReplacedError(GrpoAsyncError):
    """Another trainer, or the same one after a restart, started anew. The old weights stay."""


class WeightReceiver:
    """One per worker. Thread-safe. Subclasses check what they can by themselves.

    Args:
        device: where the worker's model is.
        base: what pushed adapters are added to.
        shapes: name -> shape of what an update has to bring, read when one arrives; {} = all of the base.
        rank: of this worker among those of its server, from 0.
    """

    def __init__(
        self, *, device: torch.device, base: BaseWeights, shapes: Mapping[str, Sequence[int]], rank: int = 0
    ) -> None:
        self.device, self.base, self.shapes = device, base, shapes
        self.rank = rank
        self._lock = threading.Lock()  # held for moments only
        self._job = 0  # number of the newest call; an older one that is still under way has lost
        self._backend: Backend | None = None
        self._is_receiving = False
        self._staged: Named | None = None

    def join(self, info: WeightInitInfo) -> Callable[[], None]:
        """Leave the group there is; what this returns joins the trainer's new one.

        Raises:
            UpdateRefusedError: no such group can exist.

        What is returned raises:
            UpdateFailedError: the group did not form within `info.timeout_s`, or was aborted.
            UpdateReplacedError: another call came.
        """
        check_membership(info)
        rank = info.rank_offset + self.rank
        with self._lock:
            job = self._begin_call(leave_group=True)

        def wait() -> None:
            try:
                backend = join_backend(info, rank=rank, device=self.device)
            except (RuntimeError, OSError) as error:
                raise UpdateFailedError(
                    f"could not join the weight group at {info.where} as rank {rank} of {info.world_size} within "
                    f"{info.timeout_s:g} s: {error}"
                ) from error
            with self._lock:
                if job == self._job:
                    self._backend = backend
                    return
            backend.close()
            raise UpdateReplacedError("another weight group was asked for in the meantime")

        return wait

    def drop(self, *, leave_group: bool = False) -> None:
        """Forget what is staged or on its way. A group in which an update is still on its way belongs to a trainer that is gone,
        so it is left too."""
        with self._lock:
            self._begin_call(leave_group=leave_group)

    def _begin_call(self, *, leave_group: bool) -> int:
        """`drop`, with the lock held; returns the number of the call that follows."""
        self._job += 1
        self._staged = None
        if leave_group or self._is_receiving:
            left, self._backend, self._is_receiving = self._backend, None, False
            if left is not None:
                # in a thread: a group in the middle of a broadcast is only gone when that ends, and an engine must not wait for it
                in_thread(left.close, name="leave-weight-group")
        return self._job

    def check_group(self) -> None:
        """Raises UpdateRefusedError: there is no group."""
        if self._backend is None:
            raise UpdateRefusedError(_NO_GROUP)

    def receive(self, info: WeightUpdateInfo) -> Callable[[], None]:
        """Drop what an earlier update left; what this returns receives every parameter of `info` and stages it.

        Raises:
            UpdateRefusedError: there is no group.

        What is returned raises:
            UpdateRefusedError: the update does not fit the model, found by `check` or `complete`.
            UpdateFailedError: the trainer vanished or was too slow.
            UpdateReplacedError: another call came.
        """
        with self._lock:  # number and group together: the group of a later call is not this update's
            job, backend = self._begin_call(leave_group=False), self._backend
            self._is_receiving = backend is not None
        if backend is None:
            raise UpdateRefusedError(_NO_GROUP)

        def wait() -> None:
            try:
                staged = self._receive(backend, info)
            except BaseException as error:
                with self._lock:
                    if job != self._job:
                        raise UpdateReplacedError(_REPLACED) from error
                    self._begin_call(leave_group=True)
                if isinstance(error, RuntimeError):
                    raise UpdateFailedError(f"the update failed, the old weights stay: {error}") from error
                raise
            with self._lock:
                if job != self._job:
                    raise UpdateReplacedError(_REPLACED)
                self._staged, self._is_receiving = staged, False

        return wait

    def take(self) -> Named | None:
        """End the update and return its parameters, which nobody else holds; None when nothing is staged."""
        with self._lock:
            staged, self._staged = self._staged, None
            return staged

    def check(self, specs: Sequence[ParameterSpec], base: AdapterBase | None) -> None:
        """Before the first byte. Raises UpdateRefusedError."""

    def complete(self, received: Named) -> Named:
        """What is staged when all is there. Raises UpdateRefusedError."""
        return received

    def _receive(self, backend: Backend, info: WeightUpdateInfo) -> Named:
        specs = parameter_specs(info)
        self.check(specs, info.base)
        staged = receive_parameters(backend, specs, bucket_bytes=info.bucket_bytes, timeout_s=info.timeout_s)
        if info.base is not None:
            dtype = getattr(torch, info.base.dtype_name)
            staged = self.base.merge(staged, shapes=self.shapes, optional=(), dtype=dtype)
        staged = self.complete(staged)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return staged


def check_membership(info: WeightInitInfo) -> None:
    """Raises UpdateRefusedError: this process opens no such store."""
    problem = problem_with_store(info)
    if problem is not None:
        raise UpdateRefusedError(problem)


def parameter_specs(info: WeightUpdateInfo) -> list[ParameterSpec]:
    """The parameters of an update. Raises UpdateRefusedError when it cannot be one."""
    names, dtypes, shapes = info.names, info.dtype_names, info.shapes
    unknown = sorted(set(dtypes) - set(ITEM_SIZES))
    if unknown or not len(names) == len(dtypes) == len(shapes):
        raise UpdateRefusedError(
            f"an update needs a dtype of {sorted(ITEM_SIZES)} and a shape per name, got {len(names)} names, {len(dtypes)} dtypes "
            f"(unknown: {unknown}), {len(shapes)} shapes"
        )
    return [
        ParameterSpec(name=name, dtype_name=dtype, shape=tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]
