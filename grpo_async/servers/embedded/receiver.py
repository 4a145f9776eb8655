"""New weights on their way in: membership of the weight group, checks against the model, staging.

    join -> start -> receive (checked before the first byte) -> take

Nothing here touches the served parameters: `take` hands the whole staged update over, to be applied between two steps.
An update that fails is dropped, and so is the group: its members may then disagree about the next broadcast, and the
trainer's wait ends with the connection. A trainer that begins anew never waits for what an earlier one left: `join` and
`start` make the end of whatever is still under way count for nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Literal

import torch

from grpo_async.errors import GrpoAsyncError
from grpo_async.inference.surface import AdapterBase, ServedParameters, WeightInitInfo, WeightUpdateInfo
from grpo_async.weights.adapters import BaseWeights
from grpo_async.weights.buckets import ITEM_SIZES, ParameterSpec
from grpo_async.weights.carrier import Carrier, join_carrier, receive_parameters
from grpo_async.weights.names import check_names

_MAX_NAMED = 8  # differences listed in one message


class UpdateRefusedError(GrpoAsyncError):
    """The update does not fit the served model, or comes out of order. The old weights stay."""


class UpdateFailedError(GrpoAsyncError):
    """The group did not form, or the trainer vanished on the way. The old weights stay."""


class UpdateSupersededError(GrpoAsyncError):
    """Another trainer, or the same one after a restart, began anew. The old weights stay."""


class WeightReceiver:
    """Receives updates for a model with the given parameters. `join` and `receive` block; call them in a thread.

    Args:
        expected: name -> parameter, as served; only dtype and shape are read.
        tied: further names of parameters -> their name in `expected`. They may be sent too, with the same values.
        device: where the model is.
        base: what pushed adapters may be added to.
    """

    def __init__(
        self,
        expected: Mapping[str, torch.Tensor],
        *,
        tied: Mapping[str, str] | None = None,
        device: torch.device,
        base: BaseWeights | None = None,
    ) -> None:
        self._base = base
        self._tied = dict(tied or {})
        self._dtypes = {name: _dtype_name(tensor.dtype) for name, tensor in expected.items()}
        self._dtypes |= {name: self._dtypes[source] for name, source in self._tied.items()}
        self.parameters = ServedParameters(
            shapes={name: list(tensor.shape) for name, tensor in expected.items()}, optional=list(self._tied)
        )
        self._device = device
        self._lock = threading.Lock()  # held for moments only
        self._job = 0  # number of the newest join or update; an older one that is still under way has lost
        self._carrier: Carrier | None = None
        self._state: Literal["idle", "started", "receiving", "staged"] = "idle"
        self._staged: dict[str, torch.Tensor] = {}

    def join(self, info: WeightInitInfo) -> None:
        """Meet the trainer's group, leaving the one before.

        Raises:
            UpdateRefusedError: no such group can exist.
            UpdateFailedError: the group did not form within `info.timeout_s`, or was called off.
            UpdateSupersededError: another call of `join` came.
        """
        if not 1 <= info.rank_offset < info.world_size:
            raise UpdateRefusedError(f"rank_offset {info.rank_offset} is no worker's rank of {info.world_size} members")
        _check_timeout(info.timeout_s)
        with self._lock:
            job = self._drop_all()
        try:
            carrier = join_carrier(
                info.transport,
                address=info.master_address,
                port=info.master_port,
                rank=info.rank_offset,
                world_size=info.world_size,
                key=info.key,
                timeout_s=info.timeout_s,
                device=self._device,
            )
        except (RuntimeError, OSError) as error:
            raise UpdateFailedError(
                f"could not join the weight group at {info.master_address}:{info.master_port} as rank "
                f"{info.rank_offset} of {info.world_size} within {info.timeout_s:g} s: {error}"
            ) from error
        with self._lock:
            if job == self._job:
                self._carrier = carrier
                return
        carrier.close()
        raise UpdateSupersededError("another weight group was asked for in the meantime")

    def start(self) -> None:
        """Begin an update; what an earlier one left is dropped, with its group where it is still receiving.

        Raises:
            UpdateRefusedError: there is no group.
        """
        with self._lock:
            if self._state == "receiving":
                self._drop_all()
            if self._carrier is None:
                raise UpdateRefusedError(
                    "there is no weight group, or a failed update ended it; call /init_weight_transfer_engine first"
                )
            self._staged = {}
            self._state = "started"

    def receive(self, info: WeightUpdateInfo) -> None:
        """Receive every parameter into staging.

        Raises:
            UpdateRefusedError: names, dtypes or shapes do not fit the model, and nothing was received; or the values of tied
                parameters differ.
            UpdateFailedError: the trainer vanished or was too slow.
            UpdateSupersededError: `join` or `start` was called meanwhile.
        """
        with self._lock:
            if self._state != "started" or self._carrier is None:
                raise UpdateRefusedError("no update was started; call /start_weight_update first")
            self._job += 1
            job, carrier, self._state = self._job, self._carrier, "receiving"
        try:
            specs = self._check(info)
            staged = dict(receive_parameters(carrier, specs, bucket_bytes=info.bucket_bytes, timeout_s=info.timeout_s))
            if info.base is not None:
                staged = self._add_to_base(staged, info.base)
            self._check_tied(staged)
        except (UpdateRefusedError, RuntimeError) as error:
            if not self.drop(job):
                raise UpdateSupersededError("another weight update began in the meantime") from error
            if isinstance(error, UpdateRefusedError):
                raise
            raise UpdateFailedError(f"the update failed, the old weights stay: {error}") from error
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        with self._lock:
            if job != self._job:
                raise UpdateSupersededError("another weight update began in the meantime")
            self._staged, self._state = staged, "staged"

    def take(self) -> dict[str, torch.Tensor] | None:
        """End the update and return its parameters, which nobody else holds; None when nothing is staged."""
        with self._lock:
            if self._state != "staged":
                return None
            staged, self._staged, self._state = self._staged, {}, "idle"
            return {name: tensor for name, tensor in staged.items() if name not in self._tied}

    def drop(self, job: int | None = None) -> bool:
        """Leave the group and forget the update that is under way; with `job`, only if that is still the newest."""
        with self._lock:
            if job not in (None, self._job):
                return False
            self._drop_all()
            return True

    def _drop_all(self) -> int:
        """Returns the number of the job that may follow."""
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.close()
        self._state = "idle"
        self._staged = {}
        self._job += 1
        return self._job

    def _check(self, info: WeightUpdateInfo) -> list[ParameterSpec]:
        names, dtypes, shapes = info.names, info.dtype_names, info.shapes
        if not len(names) == len(dtypes) == len(shapes):
            raise UpdateRefusedError(
                f"an update needs one dtype and one shape per name, got {len(names)} names, {len(dtypes)} dtypes, "
                f"{len(shapes)} shapes"
            )
        if info.bucket_bytes < 1:
            raise UpdateRefusedError(f"bucket_bytes must be at least 1, got {info.bucket_bytes}")
        _check_timeout(info.timeout_s)
        specs = [
            ParameterSpec(name=name, dtype_name=dtype, shape=tuple(shape))
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]
        tied_shapes = {name: self.parameters.shapes[source] for name, source in self._tied.items()}
        if info.base is not None:
            self._check_adapters(specs, info.base, self.parameters.shapes | tied_shapes)
            return specs
        problems = check_names(specs, self.parameters.shapes | tied_shapes, self.parameters.optional)
        problems += [
            f"{spec.name} has the dtype {spec.dtype_name}, the server's {self._dtypes[spec.name]}"
            for spec in specs
            if spec.name in self._dtypes and spec.dtype_name != self._dtypes[spec.name]
        ]
        if problems:
            raise UpdateRefusedError(
                f"the update does not fit the served model, the old weights stay: {_listed(problems)}"
            )
        return specs

    def describe(self) -> ServedParameters:
        """`parameters` with the digest of the base, which is computed once and takes a while with a large model."""
        digest = self._base.digest_or_none() if self._base is not None else None
        return self.parameters.model_copy(update={"base_digest": digest})

    def _check_adapters(
        self, specs: Sequence[ParameterSpec], base: AdapterBase, shapes: Mapping[str, Sequence[int]]
    ) -> None:
        digest = self._base.digest_or_none() if self._base is not None else None
        if self._base is None or digest != base.digest:
            raise UpdateRefusedError("adapters of another base than this server's; the old weights stay")
        problems = self._base.problems(specs, shapes, self.parameters.optional)
        if problems:
            raise UpdateRefusedError(
                f"the adapters do not fit the served model, the old weights stay: {_listed(problems)}"
            )

    def _add_to_base(self, factors: Mapping[str, torch.Tensor], base: AdapterBase) -> dict[str, torch.Tensor]:
        assert self._base is not None  # checked before anything was received
        dtype = getattr(torch, base.dtype_name)
        merged = self._base.merge(
            factors.items(), shapes=self.parameters.shapes, optional=self.parameters.optional, dtype=dtype
        )
        return {name: tensor.to(getattr(torch, self._dtypes[name])) for name, tensor in merged}

    def _check_tied(self, staged: Mapping[str, torch.Tensor]) -> None:
        wrong = [
            f"{name} is {source} in the served model, but was sent with other values"
            for name, source in self._tied.items()
            if name in staged and not _same_bytes(staged[name], staged[source])
        ]
        if wrong:
            raise UpdateRefusedError(
                f"the update does not fit the served model, the old weights stay: {_listed(wrong)}"
            )


def _check_timeout(timeout_s: float) -> None:
    if not 0.0 < timeout_s < float("inf"):
        raise UpdateRefusedError(f"timeout_s must be a positive number of seconds, got {timeout_s}")


def _listed(problems: Sequence[str]) -> str:
    more = f"; and {len(problems) - _MAX_NAMED} more" if len(problems) > _MAX_NAMED else ""
    return "; ".join(problems[:_MAX_NAMED]) + more


def _same_bytes(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.contiguous().view(torch.uint8), right.contiguous().view(torch.uint8))


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    assert name in ITEM_SIZES, f"{name} cannot travel in buckets"
    return name
