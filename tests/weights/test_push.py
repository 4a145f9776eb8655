"""The order of a push, and what holds when a phase fails."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from grpo_async.errors import WeightPushError
from grpo_async.weights.buckets import ParameterSpec
from grpo_async.weights.push import push_weights


class _Parameters:
    def __init__(self) -> None:
        self.specs = [ParameterSpec(name=str(i), dtype_name="float32", shape=(4,)) for i in range(3)]
        self.gathered = 0

    def buckets(self, bucket_bytes: int) -> Iterator[list[torch.Tensor]]:
        for _ in self.specs:
            self.gathered += 1
            yield [torch.zeros(4)]


class _Server:
    """Control and transport in one, recording what is called and failing where it is told to."""

    bucket_bytes = 16

    def __init__(self, fail_at: str = "") -> None:
        self.events: list[str] = []
        self._fail_at = fail_at

    def _do(self, event: str) -> None:
        self.events.append(event)
        if event == self._fail_at:
            raise OSError(f"{event} broke")

    def pause(self) -> None:
        self._do("pause")

    def resume(self) -> None:
        self._do("resume")

    def start_weight_update(self) -> None:
        self._do("start")

    def finish_weight_update(self, version: int) -> None:
        self._do(f"finish {version}")

    def connect(self) -> None: ...

    def announce(self, specs: list[ParameterSpec]) -> None:
        assert len(specs) == 3
        if self._fail_at == "announce":
            raise OSError("announce broke")

    def send(self, tensors: list[torch.Tensor]) -> None:
        self._do("send")

    def close(self) -> None: ...


def _push(server: _Server) -> _Parameters:
    parameters = _Parameters()
    if server._fail_at:
        with pytest.raises(WeightPushError, match=f"version 7 failed.*{server._fail_at} broke"):
            push_weights(parameters, version=7, control=server, transport=server)
    else:
        report = push_weights(
            parameters,
            version=7,
            control=server,
            transport=server,
            before_gather=lambda: server.events.append("gather"),
        )
        assert report.num_bytes == 48  # 3 parameters x 4 floats x 4 bytes
        assert report.pause_s <= report.total_s
    return parameters


class _PatientServer(_Server):
    """Answers the announcement only when the last bucket was sent, as a real server does."""

    def __init__(self, fail_at: str = "") -> None:
        super().__init__(fail_at)
        self._sent = threading.Event()

    def announce(self, specs: list[ParameterSpec]) -> None:
        assert self._sent.wait(5.0)

    def send(self, tensors: list[torch.Tensor]) -> None:
        if self._fail_at == "send" or self.events.count("send") == 2:
            self._sent.set()
        super().send(tensors)


def test_the_order_of_a_push() -> None:
    server = _PatientServer()
    _push(server)
    assert server.events == ["pause", "start", "gather", "send", "send", "send", "finish 7", "resume"]


@pytest.mark.parametrize("phase", ["start", "announce", "send", "finish 7"])
def test_a_pause_is_followed_by_a_resume_whatever_fails(phase: str) -> None:
    server = _PatientServer(phase) if phase in ("send", "finish 7") else _Server(phase)
    parameters = _push(server)
    assert server.events[0] == "pause"
    assert server.events[-1] == "resume"
    # once the other ranks are in the collective every bucket is gathered, even though sending failed
    assert parameters.gathered == (0 if phase == "start" else 3)
    if phase != "finish 7":
        assert "finish 7" not in server.events


def test_a_resume_that_fails_too_does_not_hide_the_cause() -> None:
    class Dead(_Server):
        def resume(self) -> None:
            raise OSError("connection refused")

    with pytest.raises(WeightPushError, match=r"start broke \(nor could generation be resumed: connection refused\)"):
        push_weights(_Parameters(), version=7, control=Dead("start"), transport=Dead("start"))


def test_a_pause_that_may_or_may_not_have_happened_is_resumed_too() -> None:
    server = _Server("pause")
    with pytest.raises(WeightPushError, match="pause broke"):
        push_weights(_Parameters(), version=7, control=server, transport=server)
    assert server.events == ["pause", "resume"]
