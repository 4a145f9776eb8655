"""The receiver of weights alone, with backends that end when a test says so: a newer trainer against what an older one left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

from grpo_async.inference.api import WeightInitInfo, WeightUpdateInfo
from grpo_async.weights import receiver as receiver_module
from grpo_async.weights.adapters import BaseWeights
from grpo_async.weights.receiver import UpdateRefusedError, UpdateReplacedError, WeightReceiver, parameter_specs

LIMIT_S = 20.0


class _Backend:
    """Receives zeros once it is let go; whether it was closed or not."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self.may_go, self.entered = threading.Event(), threading.Event()
        self.closed, self.breaks = threading.Event(), False

    def expect(self, num_bytes: int) -> None: ...

    def receive(self, num_bytes: int, *, timeout_s: float) -> torch.Tensor:
        self.entered.set()
        assert self.may_go.wait(LIMIT_S)
        if self.breaks:
            raise RuntimeError("connection closed by peer")
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def close(self) -> None:
        self.closed.set()


def _receiver(monkeypatch: pytest.MonkeyPatch, joins: Callable[[str], Any]) -> WeightReceiver:
    monkeypatch.setattr(receiver_module, "join_backend", lambda info, **_: joins(info.key.removeprefix("weights/")))
    return WeightReceiver(device=torch.device("cpu"), base=BaseWeights("nowhere"), shapes={"a": [4]})


def _init(key: str) -> WeightInitInfo:
    return WeightInitInfo(
        master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, timeout_s=5.0, key=f"weights/{key}"
    )


UPDATE = WeightUpdateInfo(names=["a"], dtype_names=["float32"], shapes=[[4]], bucket_bytes=64, timeout_s=5.0)


def test_a_join_that_ends_late_does_not_take_the_place_of_a_newer_group(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {"0": _Backend(), "1": _Backend()}
    old_joins, old_may_end = threading.Event(), threading.Event()

    def join(key: str) -> _Backend:
        if key == "0":
            old_joins.set()
            assert old_may_end.wait(LIMIT_S)
        return backends[key]

    receiver = _receiver(monkeypatch, join)
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(receiver.join(_init("0")))
        assert old_joins.wait(LIMIT_S)
        receiver.join(_init("1"))()
        old_may_end.set()
        with pytest.raises(UpdateReplacedError):
            late.result(LIMIT_S)
    assert (backends["0"].closed.is_set(), backends["1"].closed.is_set()) == (True, False)
    backends["1"].may_go.set()
    receiver.receive(UPDATE)()
    assert receiver.take() is not None


@pytest.mark.parametrize("breaks", [False, True])
@pytest.mark.parametrize("begins_anew", ["drop", "join"])
def test_an_update_that_ends_late_one_way_or_the_other_does_not_touch_a_newer_one(
    monkeypatch: pytest.MonkeyPatch, begins_anew: str, breaks: bool
) -> None:
    backends = [_Backend(), _Backend()]
    backends[0].breaks = breaks
    receiver = _receiver(monkeypatch, lambda key: backends[int(key)])
    receiver.join(_init("0"))()
    with ThreadPoolExecutor(1) as pool:
        late: Future[None] = pool.submit(receiver.receive(UPDATE))
        assert backends[0].entered.wait(LIMIT_S)
        assert receiver.take() is None  # a part of an update is nothing to serve
        if begins_anew == "drop":
            receiver.drop()
            with pytest.raises(UpdateRefusedError, match="no weight group"):
                receiver.receive(UPDATE)  # its group was in the middle of a broadcast
        receiver.join(_init("1"))()
        assert backends[0].closed.wait(LIMIT_S)
        backends[0].may_go.set()
        with pytest.raises(UpdateReplacedError):
            late.result(LIMIT_S)
    assert receiver.take() is None
    assert not backends[1].closed.is_set()
    backends[1].may_go.set()
    receiver.receive(UPDATE)()
    assert dict(receiver.take() or ())["a"].tolist() == [0.0] * 4


def test_what_an_earlier_update_staged_is_dropped_and_the_group_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = _Backend()
    backend.may_go.set()
    receiver = _receiver(monkeypatch, lambda key: backend)
    receiver.join(_init("0"))()
    receiver.receive(UPDATE)()
    receiver.drop()
    assert receiver.take() is None
    receiver.receive(UPDATE)()
    assert not backend.closed.is_set()
    assert receiver.take() is not None


@pytest.mark.parametrize("fault", [{"dtype_names": ["complex64"]}, {"shapes": []}, {"dtype_names": []}])
def test_an_unknown_dtype_or_missing_shape_is_refused(fault: dict[str, Any]) -> None:
    with pytest.raises(UpdateRefusedError, match=r"an update needs a dtype of .* and a shape per name"):
        parameter_specs(UPDATE.model_copy(update=fault))
    assert [spec.shape for spec in parameter_specs(UPDATE)] == [(4,)]
