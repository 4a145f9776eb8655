"""Servers without HTTP: workers in threads of this process that join real groups and load into a dict. They fail where they are
told to, and record what is asked of them. And parameters to push."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from grpo_async.errors import GrpoAsyncError, RequestRejectedError, ServerUnavailableError
from grpo_async.inference.api import Paused, WeightInitInfo, WeightUpdateInfo
from grpo_async.weights.buckets import GatheredParameters, cut_into_buckets
from grpo_async.weights.receiver import WeightReceiver, parameter_specs
from tests.support.weight_push import announcement

LIMIT_S = 60.0
"""Of every wait in these tests; none is reached when they pass."""


class Events(list[str]):
    """What happened, in order, on all servers."""

    def of(self, name: str) -> list[str]:
        """Those of one server, without its name."""
        return [event.removeprefix(f"{name} ") for event in self if event.startswith(f"{name} ")]


class Workers:
    """The control of one server. What its workers raise comes out as the answer >= 500 that the server would give.

    `faults`: phase -> what it raises there, or an event that it waits for instead of answering. In the phase "transferred" it has
    received the update.
    """

    def __init__(
        self,
        name: str,
        num_workers: int = 1,
        *,
        events: Events | None = None,
        faults: Mapping[str, Exception | threading.Event] | None = None,
        devices: Sequence[torch.device] = (),
    ) -> None:
        self.name, self.num_workers = name, num_workers
        self.served: list[dict[str, torch.Tensor]] = []
        self.version = 0
        self.is_whole = True
        self.events = Events() if events is None else events
        self.calls: dict[str, Any] = {}
        self._faults = faults or {}
        devices = devices or [torch.device("cpu")] * num_workers
        self._receivers = [WeightReceiver(device=device, rank=rank) for rank, device in enumerate(devices)]

    def _do(self, phase: str, **arguments: Any) -> None:
        self.calls[phase] = arguments
        self.events.append(f"{self.name} {phase}")
        fault = self._faults.get(phase)
        if isinstance(fault, threading.Event):
            fault.wait(LIMIT_S)
        elif fault is not None:
            raise fault

    def pause(self, **arguments: Any) -> Paused:
        self._do("pause", **arguments)
        return Paused(is_paused=True, recomputed_tokens=30, computed_tokens=60 if self.name == "a" else 180)

    def resume(self, *, timeout_s: float) -> None:
        if not self.is_whole:
            raise RequestRejectedError(409, "a part of an update")
        self._do("resume", timeout_s=timeout_s)

    def init_weight_transfer(self, info: WeightInitInfo, *, timeout_s: float) -> None:
        self._do("connect", timeout_s=timeout_s)
        self._in_threads(lambda receiver: receiver.join(info))

    def start_weight_update(self, info: WeightUpdateInfo, *, timeout_s: float) -> None:
        self._do("start", info=info, timeout_s=timeout_s)

    def update_weights(self, *, timeout_s: float) -> None:
        self._do("transfer")
        self.is_whole = False
        self.served = self._in_threads(lambda receiver: dict(receiver.receive(self.calls["start"]["info"])))
        self._do("transferred")

    def finish_weight_update(self, version: int, *, timeout_s: float) -> None:
        self._do("finish")
        self.version, self.is_whole = version, True

    def _in_threads(self, work: Any) -> list[Any]:
        with ThreadPoolExecutor(self.num_workers) as pool:
            futures = [pool.submit(work, receiver) for receiver in self._receivers]
            try:
                return [future.result(LIMIT_S) for future in futures]
            except GrpoAsyncError as error:
                raise ServerUnavailableError(f"the inference server answered 500: {error}", answered=True) from error


class DyingWorkers(Workers):
    """Their process ends in the middle of a broadcast: the connections break, and /update_weights is not answered."""

    def update_weights(self, *, timeout_s: float) -> None:
        backend = self._receivers[0]._backend
        assert backend is not None
        receive, left = backend.receive, [3]

        def receive_some(num_bytes: int, *, timeout_s: float) -> Callable[[], torch.Tensor]:
            left[0] -= 1
            if left[0] < 0:
                backend.close()
            return receive(num_bytes, timeout_s=timeout_s)

        backend.receive = receive_some  # type: ignore[method-assign]
        try:
            super().update_weights(timeout_s=timeout_s)
        except ServerUnavailableError as error:
            raise ServerUnavailableError("POST /update_weights failed 1 time: ReadError") from error


class Parameters(GatheredParameters):
    """Random tensors of several dtypes and odd sizes, so that some start unaligned in their bucket."""

    def __init__(self, *, num_layers: int = 6, events: Events | None = None) -> None:
        generator = torch.Generator().manual_seed(3)
        self.tensors: dict[str, torch.Tensor] = {}
        self.events = Events() if events is None else events
        self.num_gathered = 0
        for layer in range(num_layers):
            self.tensors[f"{layer}.weight"] = torch.randn(33, 17, generator=generator)
            self.tensors[f"{layer}.half"] = torch.randn(3, generator=generator).bfloat16()
            self.tensors[f"{layer}.count"] = torch.tensor(layer)
            self.tensors[f"{layer}.flag"] = torch.tensor([True, False, True])
        self.specs = parameter_specs(announcement(self.tensors))

    def gather(self) -> Iterator[torch.Tensor]:
        yield from self.tensors.values()

    def buckets(self, bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
        self.num_gathered = 0
        for number, bucket in enumerate(super().buckets(bucket_bytes)):
            self.events.append(f"gathering {number}")
            self.num_gathered += 1
            yield bucket

    def num_buckets(self, bucket_bytes: int) -> int:
        return len(list(cut_into_buckets(self.specs, bucket_bytes)))
