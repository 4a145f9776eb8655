"""Servers without HTTP: workers in threads of this process that join real groups and load into a dict."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from grpo_async.errors import RequestRejectedError, ServerUnavailableError
from grpo_async.inference.api import WeightInitInfo, WeightUpdateInfo
from grpo_async.weights.backend import Backend, join_backend, receive_parameters
from grpo_async.weights.receiver import parameter_specs

WAIT_S = 60.0


class Workers:
    """The workers of one server. What they raise comes out as the answer >= 500 that the server would give."""

    def __init__(self, name: str, num_workers: int = 1) -> None:
        self.name, self.num_workers = name, num_workers
        self.served: list[dict[str, torch.Tensor]] = []
        self.version = 0
        self.is_whole = True
        self.calls: list[str] = []
        self._backends: list[Backend] = []

    def pause(self, *, mode: str, keep_cache: bool, timeout_s: float) -> None:
        self.calls.append("pause")

    def resume(self, *, timeout_s: float) -> None:
        if not self.is_whole:
            raise RequestRejectedError(409, "a part of an update")
        self.calls.append("resume")

    def init_weight_transfer(self, info: WeightInitInfo, *, timeout_s: float) -> None:
        self._backends = []
        self._backends = self._in_threads(
            lambda number: join_backend(info, rank=info.rank_offset + number, device=torch.device("cpu"))
        )

    def start_weight_update(self, info: WeightUpdateInfo, *, timeout_s: float) -> None:
        self._info = info

    def update_weights(self, *, timeout_s: float) -> None:
        def receive(number: int) -> dict[str, torch.Tensor]:
            info, served = self._info, {}
            weights = receive_parameters(
                self._backends[number], parameter_specs(info), bucket_bytes=info.bucket_bytes, timeout_s=info.timeout_s
            )
            for name, tensor in weights:
                served[name] = tensor
            return served

        self.is_whole = False
        try:
            self.served = self._in_threads(receive)
        except ServerUnavailableError:
            self._backends = []
            raise

    def finish_weight_update(self, version: int, *, timeout_s: float) -> None:
        self.version, self.is_whole = version, True

    def _in_threads(self, work: Any) -> list[Any]:
        with ThreadPoolExecutor(self.num_workers) as pool:
            futures = [pool.submit(work, number) for number in range(self.num_workers)]
            try:
                return [future.result(WAIT_S) for future in futures]
            except (RuntimeError, OSError) as error:
                for backend in self._backends:
                    backend.close()
                raise ServerUnavailableError(f"the inference server answered 500: {error}", answered=True) from error


class DyingWorkers(Workers):
    """Their process ends in the middle of a broadcast: the connections break, and /update_weights is not answered."""

    def update_weights(self, *, timeout_s: float) -> None:
        (backend,) = self._backends
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
