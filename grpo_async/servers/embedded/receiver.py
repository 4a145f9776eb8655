"""New weights on their way in: membership of the weight group, checks against the model, staging.

    join -> start -> receive (checked before the first byte) -> take

Nothing here touches the served parameters: `take` hands the whole staged update over, to be applied between two steps.
An update that fails is dropped, and so is the group: its members may then disagree about the next broadcast.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from typing import Literal

import torch

from grpo_async.errors import GrpoAsyncError
from grpo_async.inference.surface import GlooInitInfo, GlooUpdateInfo
from grpo_async.weights.buckets import ITEM_SIZES, ParameterSpec
from grpo_async.weights.gloo import WeightGroup, receive_parameters

_MAX_NAMED = 8  # names listed in one message


class UpdateRefusedError(GrpoAsyncError):
    """The update does not fit the served model, or comes out of order. The old weights stay."""


class UpdateFailedError(GrpoAsyncError):
    """The group did not form, or the trainer vanished on the way. The old weights stay."""


class WeightReceiver:
    """Receives updates for a model with the given parameters. Its methods block; call them in a thread.

    Args:
        expected: name -> parameter, as served; only dtype and shape are read.
    """

    def __init__(self, expected: Mapping[str, torch.Tensor]) -> None:
        self._expected = {name: (_dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in expected.items()}
        self._group: WeightGroup | None = None
        self._state: Literal["idle", "started", "staged"] = "idle"
        self._staged: dict[str, torch.Tensor] = {}
        self._lock = threading.Lock()  # one phase at a time

    def join(self, info: GlooInitInfo) -> None:
        """Meet the trainer's group, leaving the one before.

        Raises:
            UpdateFailedError: the group did not form within `info.timeout_s`.
        """
        with self._lock:
            self._drop()
            try:
                self._group = WeightGroup.join(
                    info.master_address,
                    info.master_port,
                    rank=info.rank_offset,
                    world_size=info.world_size,
                    key=info.key,
                    timeout_s=info.timeout_s,
                    bind=_own_address_towards(info.master_address, info.master_port),
                )
            except (RuntimeError, OSError) as error:
                raise UpdateFailedError(
                    f"could not join the weight group at {info.master_address}:{info.master_port} as rank "
                    f"{info.rank_offset} of {info.world_size} within {info.timeout_s:.0f} s: {error}"
                ) from error

    def start(self) -> None:
        """Begin an update; what an earlier one left is dropped.

        Raises:
            UpdateRefusedError: there is no group.
        """
        with self._lock:
            if self._group is None:
                raise UpdateRefusedError(
                    "there is no weight group, or a failed update ended it; call /init_weight_transfer_engine first"
                )
            self._staged = {}
            self._state = "started"

    def receive(self, info: GlooUpdateInfo) -> None:
        """Receive every parameter into staging.

        Raises:
            UpdateRefusedError: names, dtypes or shapes do not fit the model; nothing was received.
            UpdateFailedError: the trainer vanished or was too slow.
        """
        with self._lock:
            if self._state != "started" or self._group is None:
                raise UpdateRefusedError("no update was started; call /start_weight_update first")
            try:
                specs = self._check(info)
                received = receive_parameters(
                    self._group, specs, bucket_bytes=info.bucket_bytes, timeout_s=info.timeout_s
                )
            except RuntimeError as error:
                self._drop()
                raise UpdateFailedError(f"the weights did not arrive, the old ones stay: {error}") from error
            except UpdateRefusedError:
                self._drop()
                raise
            self._staged = dict(received)
            self._state = "staged"

    def take(self, *, version_is_new: bool) -> dict[str, torch.Tensor]:
        """End the update and return its parameters; empty when it brought none.

        Raises:
            UpdateRefusedError: there is nothing to finish, so a new version would name the old weights.
        """
        with self._lock:
            if self._state == "idle" and version_is_new:
                raise UpdateRefusedError("there is no update to finish; call /start_weight_update and /update_weights")
            staged, self._staged = self._staged, {}
            self._state = "idle"
            return staged

    def _drop(self) -> None:
        self._group = None
        self._state = "idle"
        self._staged = {}

    def _check(self, info: GlooUpdateInfo) -> list[ParameterSpec]:
        names, dtypes, shapes = info.names, info.dtype_names, info.shapes
        if not len(names) == len(dtypes) == len(shapes):
            raise UpdateRefusedError(
                f"an update needs one dtype and one shape per name, got {len(names)} names, {len(dtypes)} dtypes, "
                f"{len(shapes)} shapes"
            )
        if info.bucket_bytes < 1:
            raise UpdateRefusedError(f"bucket_bytes must be at least 1, got {info.bucket_bytes}")
        problems = []
        if unknown := [name for name in names if name not in self._expected]:
            problems.append(f"unknown parameters: {_listed(unknown)} (of tied ones only the first name is served)")
        if missing := sorted(self._expected.keys() - set(names)):
            problems.append(f"missing parameters: {_listed(missing)}")
        if len(set(names)) != len(names):
            problems.append(f"sent twice: {_listed(sorted({name for name in names if names.count(name) > 1}))}")
        wrong = [
            f"{name} is {self._expected[name][0]} {list(self._expected[name][1])}, got {dtype} {shape}"
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
            if name in self._expected and self._expected[name] != (dtype, tuple(shape))
        ]
        if wrong:
            problems.append(f"wrong dtype or shape: {_listed(wrong)}")
        if problems:
            raise UpdateRefusedError("the update does not fit the served model: " + "; ".join(problems))
        return [
            ParameterSpec(name=name, dtype_name=dtype, shape=tuple(shape))
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
        ]


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(names[:_MAX_NAMED]) + more


def _dtype_name(dtype: torch.dtype) -> str:
    name = str(dtype).removeprefix("torch.")
    assert name in ITEM_SIZES, f"{name} cannot travel in buckets"
    return name


def _own_address_towards(host: str, port: int) -> str:
    """The address of this machine that `host` can reach; sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
