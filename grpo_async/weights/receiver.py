"""A server's end of a weight push: one worker's membership in the weight group, and the parameters that arrive.

They are loaded in place, so an incomplete update leaves parts of two versions: serve nothing until one was received completely. An
update that fails closes its group: the members may disagree about the next broadcast, and the trainer's wait ends. It also fails
if what arrived is not what the trainer holds (digests, the last bucket), or the engine did not load all of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from grpo_async.errors import GrpoAsyncError
from grpo_async.inference.api import WeightInitInfo, WeightUpdateInfo
from grpo_async.utils.text import shortlist
from grpo_async.weights.adapters import BaseWeights
from grpo_async.weights.backends import Backend, join_group
from grpo_async.weights.buckets import (
    DTYPE_NAMES,
    ParameterSpec,
    digests_of,
    samples_of,
    unpack,
    update_buckets,
)

NO_GROUP = "there is no weight group, or a failed update ended it; call /init_weight_transfer_engine first"
NOT_ARRIVED = "the weights did not arrive"
"""Part of the error of a worker whose update was interrupted."""
NOT_AS_SENT = "the trainer holds other values of"
"""Part of the error of a worker that received something else than the trainer holds."""
NOT_LOADED = "the engine did not load"
"""Part of the error of a worker that does not hold what it received."""


class UpdateRefusedError(GrpoAsyncError):
    """The update does not fit the served model, or is out of order. Nothing was changed."""


class UpdateFailedError(GrpoAsyncError):
    """The group did not form, or the trainer vanished during the update."""


class WeightReceiver:
    """Receives weights on `device`; one per worker, whose rank within its server is `rank`."""

    def __init__(self, *, device: torch.device, rank: int = 0) -> None:
        self.device, self.rank = device, rank
        self._waited_s = 0.0  # for the parameters of the last update
        self._has_all = False  # all of it has arrived as it was sent
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

    def update(
        self,
        info: WeightUpdateInfo,
        base: BaseWeights,
        load: Callable[[Iterator[tuple[str, torch.Tensor]]], Iterable[str]],
        *,
        wanted: Collection[str] = (),
    ) -> str:
        """Have `load` load an update while it arrives, adapters merged into `base` unless they are swapped; it returns what it left
        as it was. Returns a line for the log. `wanted`: names of the parameters that the server wants; empty: all.

        Raises:
            UpdateFailedError: the update did not arrive as it was sent, or was not loaded completely.
            OutOfMemoryError: there is no memory for a bucket."""
        began, self._has_all = time.monotonic(), False
        weights = self.receive(info)
        if info.base is not None and not info.swap:
            dtype = getattr(torch, info.base.dtype_name)
            weights = base.merge(weights, wanted=wanted, dtype=dtype, device=self.device)
        left_out = list(load(weights))
        if left_out or not self._has_all:
            self.leave()
            what = shortlist(left_out, ", ") if left_out else "all that was sent"
            raise UpdateFailedError(f"{NOT_LOADED} {what}")
        load_s = time.monotonic() - began - self._waited_s
        return f"loaded {len(info.names)} parameters in {load_s:.4f} s, and waited {self._waited_s:.4f} s"

    def receive(self, info: WeightUpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the parameters of `info` (or factors of adapters) in their order: a bucket is received while the previous one
        is being loaded. A tensor may be kept; its bucket's memory lives as long."""
        backend, timeout_s = self._backend, info.timeout_s
        if backend is None:
            raise UpdateFailedError(NO_GROUP)
        specs = parameter_specs(info)
        buckets = update_buckets(specs, info.bucket_bytes)
        samples: list[torch.Tensor] = []

        def begin(number: int) -> Callable[[], torch.Tensor]:
            return backend.receive(sum(spec.num_bytes for spec in buckets[number]), timeout_s=timeout_s)

        self._waited_s, ahead = 0.0, None
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
            self._waited_s += time.monotonic() - asked
            named = list(unpack(buffer, bucket))
            if number + 1 == len(buckets):
                self._compare(specs, named[0][1], digests_of(samples))
                return
            samples.append(samples_of(tensor for _, tensor in named))
            yield from named
            del buffer, wait, named  # otherwise it would stay in memory while the next one is loaded

    def _compare(self, specs: Sequence[ParameterSpec], sent: torch.Tensor, arrived: torch.Tensor) -> None:
        if differ := (sent != arrived).nonzero().flatten().tolist():
            self.leave()
            raise UpdateFailedError(f"{NOT_AS_SENT} {shortlist([specs[i].name for i in differ], ', ')}")
        self._has_all = True


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
