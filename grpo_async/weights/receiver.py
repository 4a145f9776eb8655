"""One worker's end of weight updates: its membership of the weight group, and the parameters that arrive.

    join -> receive -> receive -> ... -> join, when the group is another one

A worker does one of them at a time, and what is received is loaded in place, so a part of an update leaves parts of two versions
behind: who asked for it must then serve nothing before another update was received wholly. An update that fails takes its group
with it: the members may disagree about the next broadcast, and the trainer's wait ends with the connection.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from grpo_async.errors import GrpoAsyncError
from grpo_async.inference.api import WeightInitInfo, WeightUpdateInfo
from grpo_async.weights.backend import Backend, join_backend, receive_parameters
from grpo_async.weights.buckets import DTYPE_NAMES, ParameterSpec
from grpo_async.weights.rendezvous import problem_with_store

NO_GROUP = "there is no weight group, or a failed update ended it; call /init_weight_transfer_engine first"


class UpdateRefusedError(GrpoAsyncError):
    """The update does not fit the served model, or comes out of order. Nothing was changed."""


class UpdateFailedError(GrpoAsyncError):
    """The group did not form, or the trainer vanished on the way."""


class WeightReceiver:
    """One per worker.

    Args:
        device: where the worker's model is.
        rank: of this worker among those of its server, from 0.
    """

    def __init__(self, *, device: torch.device, rank: int = 0) -> None:
        self.device, self.rank = device, rank
        self.waited_s = 0.0
        """For the parameters of the last update to arrive."""
        self._backend: Backend | None = None

    def join(self, info: WeightInitInfo) -> None:
        """Leave the group there is, and join the trainer's new one.

        Raises:
            UpdateRefusedError: this process opens no such store.
            UpdateFailedError: the group did not form within `info.timeout_s`, or was aborted.
        """
        check_membership(info)
        self.leave()
        rank = info.rank_offset + self.rank
        try:
            self._backend = join_backend(info, rank=rank, device=self.device)
        except (RuntimeError, OSError) as error:
            raise UpdateFailedError(
                f"could not join the weight group at {info.where} as rank {rank} of {info.world_size} within "
                f"{info.timeout_s:g} s: {error}"
            ) from error

    def leave(self) -> None:
        """Leave the group, if there is one."""
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def receive(self, info: WeightUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters of `info` (or factors of adapters), as they arrive.

        Raises (when the first one is asked for, or later):
            UpdateFailedError: there is no group, or the trainer vanished or was too slow.
            torch.OutOfMemoryError: no memory for a bucket.
        """
        if self._backend is None:
            raise UpdateFailedError(NO_GROUP)
        specs = parameter_specs(info)
        self.waited_s, asked = 0.0, time.monotonic()
        try:
            for parameter in receive_parameters(
                self._backend, specs, bucket_bytes=info.bucket_bytes, timeout_s=info.timeout_s
            ):
                self.waited_s += time.monotonic() - asked
                yield parameter
                asked = time.monotonic()
        except torch.OutOfMemoryError:
            self._backend = None
            raise
        except RuntimeError as error:
            self._backend = None  # it is closed
            raise UpdateFailedError(str(error)) from error


def check_membership(info: WeightInitInfo) -> None:
    """Raises UpdateRefusedError: this process opens no such store."""
    problem = problem_with_store(info)
    if problem is not None:
        raise UpdateRefusedError(problem)


def parameter_specs(info: WeightUpdateInfo) -> list[ParameterSpec]:
    """The parameters of an update. Raises UpdateRefusedError when it cannot be one."""
    names, dtypes, shapes = info.names, info.dtype_names, info.shapes
    unknown = sorted(set(dtypes) - set(DTYPE_NAMES))
    if unknown or not len(names) == len(dtypes) == len(shapes):
        raise UpdateRefusedError(
            f"an update needs a dtype of {sorted(DTYPE_NAMES)} and a shape per name, got {len(names)} names, {len(dtypes)} dtypes "
            f"(unknown: {unknown}), {len(shapes)} shapes"
        )
    return [
        ParameterSpec(name=name, dtype_name=dtype, shape=tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]
