"""Servers without HTTP: workers in threads of this process that join real groups and load into a dict."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from grpo_async.errors import GrpoAsyncError, RequestRejectedError, ServerUnavailableError
from grpo_async.inference.api import WeightInitInfo, WeightUpdateInfo
from grpo_async.weights.receiver import WeightReceiver

WAIT_S = 60.0


class Workers:
    """The workers of one server. What they raise comes out as the answer >= 500 that the server would give."""

    def __init__(self, name: str, num_workers: int = 1) -> None:
        self.name, self.num_workers = name, num_workers
        self.served: list[dict[str, torch.Tensor]] = []
        self.version = 0
        self.is_whole = True
        self.calls: list[str] = []
        self._receivers = [WeightReceiver(device=torch.device("cpu"), rank=rank) for rank in range(num_workers)]

    def pause(self, *, mode: str, keep_cache: bool, timeout_s: float) -> None:
        self.calls.append("pause")

    def resume(self, *, timeout_s: float) -> None:
        if not self.is_whole:
            raise RequestRejectedError(409, "a part of an update")
        self.calls.append("resume")

    def init_weight_transfer(self, info: WeightInitInfo, *, timeout_s: float) -> None:
        self._in_threads(lambda receiver: receiver.join(info))

    def start_weight_update(self, info: WeightUpdateInfo, *, timeout_s: float) -> None:
        self._info = info

    def update_weights(self, *, timeout_s: float) -> None:
        self.is_whole = False
        self.served = self._in_threads(lambda receiver: dict(receiver.receive(self._info)))

    def finish_weight_update(self, version: int, *, timeout_s: float) -> None:
        self.version, self.is_whole = version, True

    def _in_threads(self, work: Any) -> list[Any]:
        with ThreadPoolExecutor(self.num_workers) as pool:
            futures = [pool.submit(work, receiver) for receiver in self._receivers]
            try:
                return [future.result(WAIT_S) for future in futures]
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
            raise ServerUnavailableError("POST /update_weights failed 1 times: ReadError") from error
