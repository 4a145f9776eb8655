"""The receiver alone, with carriers that end when a test says so: a newer trainer against what an older one left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from grpo_async.inference.surface import WeightInitInfo, WeightUpdateInfo
from grpo_async.servers.embedded import receiver as receiver_module
from grpo_async.servers.embedded.receiver import UpdateRefusedError, UpdateSupersededError, WeightReceiver

LIMIT_S = 20.0


class _Carrier:
    """Receives zeros once it is let go; whether it was closed or not."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.may_go, self.entered = threading.Event(), threading.Event()
        self.closed = self.breaks = False

    def expect(self, num_bytes: int) -> None: ...

    def receive(self, num_bytes: int, *, timeout_s: float) -> torch.Tensor:
        self.entered.set()
        assert self.may_go.wait(LIMIT_S)
        if self.breaks:
            raise RuntimeError("connection closed by peer")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def close(self) -> None:
        self.closed = True


def _receiver(monkeypatch: pytest.MonkeyPatch, joins: Callable[[str], Any]) -> WeightReceiver:
    monkeypatch.setattr(receiver_module, "join_carrier", lambda kind, **fields: joins(fields["key"]))
    return WeightReceiver({"a": torch.ones(4)}, device=torch.device("cpu"))


def _init(key: str) -> WeightInitInfo:
    return WeightInitInfo(
        master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, timeout_s=5.0, key=key
    )


UPDATE = WeightUpdateInfo(names=["a"], dtype_names=["float32"], shapes=[[4]], bucket_bytes=64, timeout_s=5.0)


def test_a_join_that_ends_late_does_not_take_the_place_of_a_newer_group(monkeypatch: pytest.MonkeyPatch) -> None:
    carriers = {"old": _Carrier(), "new": _Carrier()}
    old_joins, old_may_end = threading.Event(), threading.Event()

    def join(key: str) -> _Carrier:
        if key == "old":
            old_joins.set()
            assert old_may_end.wait(LIMIT_S)
        return carriers[key]

    receiver = _receiver(monkeypatch, join)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(receiver.join, _init("old"))
        assert old_joins.wait(LIMIT_S)
        receiver.join(_init("new"))
        old_may_end.set()
        with pytest.raises(UpdateSupersededError):
            late.result(LIMIT_S)
    assert (carriers["old"].closed, carriers["new"].closed) == (True, False)
    receiver.start()
    carriers["new"].may_go.set()
    receiver.receive(UPDATE)
    assert receiver.take() is not None


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("begins_anew", ["start", "join"])
def test_an_update_that_ends_late_one_way_or_the_other_does_not_touch_a_newer_one(
    monkeypatch: pytest.MonkeyPatch, begins_anew: str, breaks: bool
) -> None:
    carriers = [_Carrier(), _Carrier()]
    carriers[0].breaks = breaks
    receiver = _receiver(monkeypatch, lambda key: carriers[int(key)])
    receiver.join(_init("0"))
    receiver.start()
    with ThreadPoolExecutor(1) as pool:
        late: Future[None] = pool.submit(receiver.receive, UPDATE)
        assert carriers[0].entered.wait(LIMIT_S)
        assert receiver.take() is None  # a part of an update is nothing to serve
        if begins_anew == "start":
            with pytest.raises(UpdateRefusedError, match="no weight group"):
                receiver.start()  # its group is in the middle of a broadcast
        receiver.join(_init("1"))
        receiver.start()
        assert carriers[0].closed
        carriers[0].may_go.set()
        with pytest.raises(UpdateSupersededError):
            late.result(LIMIT_S)
    assert receiver.take() is None
    assert not carriers[1].closed
    carriers[1].may_go.set()
    receiver.receive(UPDATE)
    assert (receiver.take() or {})["a"].tolist() == [0.0] * 4


def test_a_start_drops_what_an_earlier_update_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    carrier = _Carrier()
    carrier.may_go.set()
    receiver = _receiver(monkeypatch, lambda key: carrier)
    receiver.join(_init("0"))
    for _ in range(2):
        receiver.start()
        receiver.receive(UPDATE)
    receiver.start()
    assert receiver.take() is None
    assert not carrier.closed  # the group is good for the next update
    with pytest.raises(UpdateRefusedError, match="start_weight_update"):
        receiver.receive(UPDATE), receiver.receive(UPDATE)
