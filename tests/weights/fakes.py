"""Stand-ins for servers and transport that record what is called, fail where they are told to, and block until they may go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from grpo_async.weights.buckets import ParameterSpec
from grpo_async.weights.calls import split_failed

LIMIT_S = 20.0
"""Of every wait in these tests; none is reached when they pass."""


class Events:
    """What happened, in order, on all servers."""

    def __init__(self) -> None:
        self._events: list[str] = []
        self._changed = threading.Condition()

    def add(self, event: str) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    def all(self) -> list[str]:
        with self._changed:
            return list(self._events)

    def of(self, name: str) -> list[str]:
        """Those of one server, without its name."""
        return [event.removeprefix(f"{name} ") for event in self.all() if event.startswith(f"{name} ")]

    def wait_for(self, *events: str) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: set(events) <= set(self._events), LIMIT_S), (events, self._events)


class FakeServer:
    """The control of one server. `faults`: phase -> what it raises there, or an event that it waits for instead of answering."""

    num_workers = 1

    def __init__(self, name: str, events: Events, faults: dict[str, Exception | threading.Event] | None = None) -> None:
        self.name = name
        self.calls: dict[str, Any] = {}
        self.faults = faults or {}
        self.barriers: dict[str, threading.Barrier] = {}
        self._events = events

    def _do(self, phase: str, **arguments: Any) -> None:
        self.calls[phase] = arguments
        self._events.add(f"{self.name} {phase}")
        if phase in self.barriers:
            self.barriers[phase].wait(LIMIT_S)
        fault = self.faults.get(phase)
        if isinstance(fault, threading.Event):
            fault.wait(LIMIT_S)
        elif fault is not None:
            raise fault

    def pause(self, *, mode: str, keep_cache: bool, timeout_s: float) -> None:
        self._do("pause", mode=mode, keep_cache=keep_cache, timeout_s=timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        self._do("resume", timeout_s=timeout_s)

    def start_weight_update(self, *, timeout_s: float) -> None:
        self._do("start", timeout_s=timeout_s)

    def update_weights(self, info: Any, *, timeout_s: float) -> None:
        self._do("transfer", info=info)

    def finish_weight_update(self, version: int, *, timeout_s: float) -> None:
        self._do("finish", version=version, timeout_s=timeout_s)


class FakeTransport:
    """Announcements are answered when the last bucket was sent, as real servers do."""

    bucket_bytes = 16
    receives_beside_steps = True

    def __init__(self, events: Events, *, num_buckets: int = 3, broken_at: int | None = None) -> None:
        self.is_closed = False
        self.sent: list[int] = []
        self.packed: list[int] = []
        self.is_over = threading.Event()  # all sent, or broken
        self._events = events
        self._num_buckets = num_buckets
        self._broken_at = broken_at

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        number = int(tensors[0][0])
        self.packed.append(number)
        self._events.add(f"packed {number}")
        return tensors[0]

    def send(self, buffer: torch.Tensor) -> None:
        number = int(buffer[0])
        self._events.add(f"sending {number}")
        if number == self._broken_at:
            self.is_over.set()
            raise RuntimeError("connection reset by peer")
        self.sent.append(number)
        if len(self.sent) == self._num_buckets:
            self.is_over.set()

    def announce(self, server: Any, specs: Sequence[ParameterSpec]) -> None:
        fault = server.faults.get("transfer")
        if fault is None or (isinstance(fault, Exception) and split_failed({server.name: fault})[1]):
            assert self.is_over.wait(LIMIT_S)
        server.update_weights([spec.name for spec in specs], timeout_s=1.0)

    def close(self) -> None:
        self.is_closed = True
        self.is_over.set()


class FakeParameters:
    """Bucket i is four floats, the first of which is i."""

    def __init__(self, events: Events, *, num_buckets: int = 3) -> None:
        self.specs = [ParameterSpec(name=str(i), dtype_name="float32", shape=(4,)) for i in range(num_buckets)]
        self.gathered = 0
        self._events = events

    def buckets(self, bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
        for number in range(len(self.specs)):
            self._events.add(f"gathering {number}")
            self.gathered += 1
            yield [torch.full((4,), float(number))]
