"""A server's end of a weight push: one worker's membership in the weight group, and the parameters that arrive.

They are loaded in place, so an incomplete update leaves parts of two versions: serve nothing until one was received completely. An
update that fails closes its group: the members may disagree about the next broadcast, and the trainer's wait ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator

import torch

from grpo_async.errors import GrpoAsyncError
from grpo_async.inference.api import WeightInitInfo, WeightUpdateInfo
from grpo_async.weights.adapters import BaseWeights
from grpo_async.weights.backends import Backend, join_group
from grpo_async.weights.buckets import DTYPE_NAMES, ParameterSpec, cut_into_buckets, unpack

NO_GROUP = "there is no weight group, or a failed update ended it; call /init_weight_transfer_engine first"
NOT_ARRIVED = "the weights did not arrive"
"""Part of the error of a worker whose update was interrupted."""


class UpdateRefusedError(GrpoAsyncError):
    """The update does not fit the served model, or is out of order. Nothing was changed."""


class UpdateFailedError(GrpoAsyncError):
    """The group did not form, or the trainer vanished during the update."""


class WeightReceiver:
    """Receives weights on `device`; one per worker, whose rank within its server is `rank`."""

    def __init__(self, *, device: torch.device, rank: int = 0) -> None:
        self.device, self.rank = device, rank
        self.waited_s = 0.0
        """Seconds spent waiting for the parameters of the last update."""
        self._backend: Backend | None = None

    def join(self, info: WeightInitInfo) -> None:
        """Leave the current group, if any, and join the trainer's new one. Raises UpdateFailedError if it does not form."""
        self.leave()
        rank = info.rank_offset + self.rank
        try:
            self._backend = join_group(info, rank=rank, device=self.device)
        except (RuntimeError, OSError) as error:
            raise UpdateFailedError(
                f"could not join the weight group at {info.master_address}:{info.master_port} as rank {rank} of "
                f"{info.world_size} within {info.timeout_s:g} s: {error}"
            ) from error

    def leave(self) -> None:
        backend, self._backend = self._backend, None
        if backend is not None:
            backend.close()

    def receive_weights(
        self, info: WeightUpdateInfo, base: BaseWeights, wanted: Collection[str] = ()
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Like `receive`, but an update of adapters is merged into `base`. `wanted`: names of the parameters that the server
        wants; empty: all."""
        received = self.receive(info)
        if info.base is None:
            return received
        return base.merge(received, wanted=wanted, dtype=getattr(torch, info.base.dtype_name), device=self.device)

    def receive(self, info: WeightUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of `info` (or factors of adapters) in their order: a bucket is received while the previous one
        is being loaded. A tensor may be kept; its bucket's memory lives as long. Raises UpdateFailedError (NOT_ARRIVED), or
        OutOfMemoryError.
        """
        backend, timeout_s = self._backend, info.timeout_s
        if backend is None:
            raise UpdateFailedError(NO_GROUP)
        buckets = list(cut_into_buckets(parameter_specs(info), info.bucket_bytes))

        def begin(number: int) -> Callable[[], torch.Tensor]:
            return backend.receive(sum(spec.num_bytes for spec in buckets[number]), timeout_s=timeout_s)

        self.waited_s, ahead = 0.0, None
        for number, bucket in enumerate(buckets):
            asked = time.monotonic()
            try:
                wait = ahead or begin(number)
                ahead = begin(number + 1) if number + 1 < len(buckets) else None
                buffer = wait()
            except torch.OutOfMemoryError:  # this worker's own failure
                self.leave()
                raise
            except RuntimeError as error:
                self.leave()
                raise UpdateFailedError(f"{NOT_ARRIVED} (bucket {number}): {error}") from error
            self.waited_s += time.monotonic() - asked
            yield from unpack(buffer, bucket)
            del buffer, wait  # otherwise it would stay in memory while the next one is loaded


def parameter_specs(info: WeightUpdateInfo) -> list[ParameterSpec]:
    names, dtypes, shapes = info.names, info.dtype_names, info.shapes
    known = sorted(DTYPE_NAMES.values())
    unknown = sorted(set(dtypes) - set(known))
    if unknown or not len(names) == len(dtypes) == len(shapes):
        raise UpdateRefusedError(
            f"an update needs a dtype of {known} and a shape per name, got {len(names)} names, {len(dtypes)} dtypes "
            f"(unknown: {unknown}), {len(shapes)} shapes"
        )
    return [
        ParameterSpec(name=name, dtype_name=dtype, shape=tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    ]
