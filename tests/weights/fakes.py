"""Stand-ins for servers and transport that record what is called, fail where they are told to, and block until they may go on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from grpo_async.weights.buckets import ParameterSpec
from grpo_async.weights.push import _is_affected

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
        self.transport: FakeTransport | None = None
        self._events = events

    def _do(self, phase: str, **arguments: Any) -> None:
        self.calls[phase] = arguments
        self._events.add(f"{self.name} {phase}")
        fault = self.faults.get(phase)
        if isinstance(fault, threading.Event):
            fault.wait(LIMIT_S)
        elif fault is not None:
            raise fault

    def pause(self, *, mode: str, keep_cache: bool, timeout_s: float) -> None:
        self._do("pause", mode=mode, keep_cache=keep_cache, timeout_s=timeout_s)

    def resume(self, *, timeout_s: float) -> None:
        self._do("resume", timeout_s=timeout_s)

    def start_weight_update(self, info: Any, *, timeout_s: float) -> None:
        self._do("start", info=info, timeout_s=timeout_s)

    def update_weights(self, *, timeout_s: float) -> None:
        assert self.transport is not None
        self.transport.wait_for_the_end(self)
        self._do("transfer")

    def finish_weight_update(self, version: int, *, timeout_s: float) -> None:
        self._do("finish", version=version, timeout_s=timeout_s)


class FakeTransport:
    """Updates are answered when the last bucket was sent, as real servers do. A send ends at once, or when `may_end` of its bucket
    is set."""

    bucket_bytes = 16

    def __init__(self, events: Events, *, num_buckets: int = 3, broken_at: int | None = None) -> None:
        self.members: tuple[str, ...] = ("a", "b")
        self.is_closed = False
        self.sent: list[int] = []
        self.may_end: dict[int, threading.Event] = {}
        self.is_over = threading.Event()  # all sent, or broken
        self._events = events
        self._num_buckets = num_buckets
        self._broken_at = broken_at

    def connect(self, servers: Sequence[Any]) -> None:
        self._events.add("connected")
        self.members = tuple(server.name for server in servers)

    def describe(self, specs: Sequence[ParameterSpec]) -> list[str]:
        return [spec.name for spec in specs]

    def pack(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        self._events.add(f"packed {int(tensors[0][0])}")
        return tensors[0]

    def send(self, bucket: torch.Tensor) -> Callable[[], None]:
        if self.is_closed:
            raise RuntimeError("the weight group is closed")
        number = int(bucket[0])
        self._events.add(f"sending {number}")

        def wait() -> None:
            if number in self.may_end:
                assert self.may_end[number].wait(LIMIT_S)
            if number == self._broken_at or self.is_closed:
                self.is_over.set()
                raise RuntimeError("connection reset by peer")
            self._events.add(f"sent {number}")
            self.sent.append(number)
            if len(self.sent) == self._num_buckets:
                self.is_over.set()

        return wait

    def wait_for_the_end(self, server: FakeServer) -> None:
        """What a server does before it answers, unless it fails by itself."""
        fault = server.faults.get("transfer")
        if fault is None or (isinstance(fault, Exception) and _is_affected(fault)):
            assert self.is_over.wait(LIMIT_S)

    def closer(self) -> Callable[[], None]:
        return self.close

    def close(self) -> None:
        self.is_closed = True
        self.members = ()
        self.is_over.set()
        for event in self.may_end.values():
            event.set()


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
