"""New weights on their way into one vLLM worker: membership of the weight group, and staging memory.

    join -> drop -> receive -> take (applied by the caller, in one call of the engine core)

Joining and receiving wait for the trainer, so they run in a thread and report their end; the worker goes on generating with
its old weights. Every job has a number: `drop` and newer jobs make the end of an older one count for nothing. Imports no vLLM.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

import torch

from grpo_async.inference.surface import WeightInitInfo, WeightUpdateInfo
from grpo_async.servers.vllm.reports import Reporter
from grpo_async.weights.adapters import BaseWeights
from grpo_async.weights.buckets import ParameterSpec
from grpo_async.weights.carrier import Carrier, join_carrier, receive_parameters

logger = logging.getLogger("vllm.grpo_async")

_SUPERSEDED = "another update has begun since"


class WeightReceiver:
    """One per vLLM worker. Thread-safe.

    Args:
        rank: of this worker among those of its server, from 0.
        device: where its model is.
        base: what pushed adapters are added to.
        served: name -> shape of what the update has to bring, read when an update arrives; {} = all of the base.
    """

    def __init__(
        self, *, rank: int, device: torch.device, base: BaseWeights, served: Mapping[str, tuple[int, ...]]
    ) -> None:
        self._rank, self._device = rank, device
        self._base, self._served = base, served
        self._lock = threading.Lock()
        self._job = 0
        self._carrier: Carrier | None = None
        self._receiving = False
        self._staged: list[tuple[str, torch.Tensor]] | None = None

    def join(self, info: WeightInitInfo, *, report_to: str) -> None:
        """Begin to meet the trainer's group, leaving the one before; the end is reported to `report_to`."""
        reporter = Reporter(report_to, rank=self._rank)
        job = self.drop(leave_group=True)

        def run() -> None:
            carrier = join_carrier(
                info.transport,
                address=info.master_address,
                port=info.master_port,
                rank=info.rank_offset + self._rank,
                world_size=info.world_size,
                key=info.key,
                timeout_s=info.timeout_s,
                device=self._device,
            )
            with self._lock:
                if job == self._job:
                    self._carrier = carrier
                    return
            _leave(carrier)
            raise RuntimeError(_SUPERSEDED)

        self._start(run, reporter, "join-weight-group")

    def drop(self, *, leave_group: bool = False) -> int:
        """Forget what is staged or on its way, and return the number of the job that may follow.

        A job that is still receiving belongs to a trainer that is gone, so its group goes with it.
        """
        with self._lock:
            job, left = self._forget(leave_group=leave_group)
        _leave(left)
        return job

    def receive(self, info: WeightUpdateInfo, *, report_to: str) -> None:
        """Begin to receive every parameter of `info` into staging memory; the end is reported to `report_to`.

        Raises:
            RuntimeError: there is no weight group.
        """
        job = self.drop()
        with self._lock:
            carrier = self._carrier
        if carrier is None:
            raise RuntimeError(
                "no weight group: call /init_weight_transfer_engine first, and again after an update that failed"
            )
        reporter = Reporter(report_to, rank=self._rank)
        with self._lock:
            self._receiving = True

        def run() -> None:
            try:
                staged = self._receive(carrier, info)
            except BaseException:
                with self._lock:
                    left = self._forget(leave_group=True)[1] if job == self._job else None
                _leave(left)  # its members may now disagree about the next bucket
                raise
            with self._lock:
                if job != self._job:
                    raise RuntimeError(_SUPERSEDED)
                self._staged, self._receiving = staged, False

        self._start(run, reporter, "receive-weights")

    def take(self) -> list[tuple[str, torch.Tensor]] | None:
        """End the update: its parameters, which nobody else holds; None when nothing is staged."""
        with self._lock:
            staged, self._staged = self._staged, None
            return staged

    def _forget(self, *, leave_group: bool) -> tuple[int, Carrier | None]:
        """Number of the next job, and the carrier to close. The caller holds the lock."""
        self._job += 1
        self._staged, left = None, None
        if leave_group or self._receiving:
            left, self._carrier, self._receiving = self._carrier, None, False
        return self._job, left

    def _receive(self, carrier: Carrier, info: WeightUpdateInfo) -> list[tuple[str, torch.Tensor]]:
        staged = receive_parameters(
            carrier, parameter_specs(info), bucket_bytes=info.bucket_bytes, timeout_s=info.timeout_s
        )
        if info.base is not None:
            staged = self._base.merge(
                staged, shapes=self._served, optional=(), dtype=getattr(torch, info.base.dtype_name)
            )
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return staged

    def _start(self, job: Callable[[], None], reporter: Reporter, name: str) -> None:
        def run() -> None:
            error = ""
            try:
                if self._device.type == "cuda":
                    torch.cuda.set_device(self._device)
                job()
            except BaseException as failure:  # noqa: BLE001 - reported to the API server, which answers with it
                logger.warning("%s failed: %s", name, failure)
                error = f"{type(failure).__name__}: {failure}"
            try:
                reporter.send(error)
            except OSError:
                logger.warning("%s ended, and nobody waits for it any more", name)

        # a daemon: one that waits for a dead trainer must not hold the process
        threading.Thread(target=run, name=name, daemon=True).start()


def _leave(carrier: Carrier | None) -> None:
    """Close `carrier`, in a thread: a group in the middle of a broadcast is only gone when that ends, and the engine core must
    not wait for it."""
    if carrier is not None:
        threading.Thread(target=carrier.close, name="leave-weight-group", daemon=True).start()


def parameter_specs(info: WeightUpdateInfo) -> list[ParameterSpec]:
    """The parameters of an update. Raises ValueError when its lists differ in length."""
    return [
        ParameterSpec(name=name, dtype_name=dtype_name, shape=tuple(shape))
        for name, dtype_name, shape in zip(info.names, info.dtype_names, info.shapes, strict=True)
    ]
