"""Servers without HTTP: workers in threads of this process, or in a process of their own, that join real groups and stage."""

from __future__ import annotations

import multiprocessing
import threading
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import torch

from grpo_async.errors import ServerUnavailableError
from grpo_async.inference.surface import WeightInitInfo, WeightUpdateInfo
from grpo_async.weights.backend import Backend, join_backend, receive_parameters
from grpo_async.weights.receiver import parameter_specs

WAIT_S = 60.0


class Workers:
    """The workers of one server. What they raise comes out as the answer >= 500 that the server would give."""

    def __init__(self, name: str, num_workers: int = 1) -> None:
        self.name, self.num_workers = name, num_workers
        self.staged: list[dict[str, torch.Tensor]] = []
        self.served: list[dict[str, torch.Tensor]] = []
        self.version = 0
        self.calls: list[str] = []
        self._backends: list[Backend] = []

    def pause(self, *, mode: str, keep_cache: bool, timeout_s: float) -> None:
        self.calls.append("pause")

    def resume(self, *, timeout_s: float) -> None:
        self.calls.append("resume")

    def init_weight_transfer(self, info: WeightInitInfo, *, timeout_s: float) -> None:
        self._backends = []
        self._backends = self._in_threads(
            lambda number: join_backend(info, rank=info.rank_offset + number, device=torch.device("cpu"))
        )

    def start_weight_update(self, *, timeout_s: float) -> None:
        self.staged = []

    def update_weights(self, info: WeightUpdateInfo, *, timeout_s: float) -> None:
        def receive(number: int) -> dict[str, torch.Tensor]:
            return dict(
                receive_parameters(
                    self._backends[number],
                    parameter_specs(info),
                    bucket_bytes=info.bucket_bytes,
                    timeout_s=info.timeout_s,
                )
            )

        try:
            self.staged = self._in_threads(receive)
        except ServerUnavailableError:
            self._backends = []
            raise

    def finish_weight_update(self, version: int, *, timeout_s: float) -> None:
        self.served, self.staged, self.version = self.staged, [], version

    def _in_threads(self, work: Any) -> list[Any]:
        with ThreadPoolExecutor(self.num_workers) as pool:
            futures = [pool.submit(work, number) for number in range(self.num_workers)]
            try:
                return [future.result(WAIT_S) for future in futures]
            except (RuntimeError, OSError) as error:
                for backend in self._backends:
                    backend.close()
                raise ServerUnavailableError(f"the inference server answered 500: {error}", answered=True) from error


class ServerProcess:
    """`Workers` in a process that can be killed or stopped; a broken pipe is the broken connection."""

    def __init__(self, name: str) -> None:
        self.name, self.num_workers = name, 1
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._lock = threading.Lock()
        self.process = context.Process(target=_serve, args=(other, name), daemon=True)
        self.process.start()
        other.close()

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        def call(*positional: Any, timeout_s: float = WAIT_S, **arguments: Any) -> Any:
            return self._call(method, timeout_s, *positional, **arguments)

        return call

    def _call(self, method: str, timeout_s: float, *positional: Any, **arguments: Any) -> Any:
        with self._lock:
            try:
                self._pipe.send((method, positional, {**arguments, "timeout_s": timeout_s}))
                if not self._pipe.poll(timeout_s):
                    raise ServerUnavailableError(f"no answer to {method} within {timeout_s} s")
                result = self._pipe.recv()
            except (EOFError, OSError) as error:
                raise ServerUnavailableError(f"{method}: {type(error).__name__}") from error
        if isinstance(result, str):
            raise ServerUnavailableError(result, answered=True)
        return result

    def end(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


def _serve(pipe: Connection, name: str) -> None:
    torch.set_num_threads(1)
    workers = Workers(name)
    while True:
        method, positional, arguments = pipe.recv()
        if method == "calls":
            pipe.send(list(workers.calls))
        else:
            try:
                getattr(workers, method)(*positional, **arguments)
                pipe.send(None)
            except ServerUnavailableError as error:
                pipe.send(str(error))
