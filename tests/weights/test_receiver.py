"""A worker's end of weight updates alone, with a backend that does as a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from grpo_async.inference.api import WeightInitInfo, WeightUpdateInfo
from grpo_async.weights import receiver as receiver_module
from grpo_async.weights.receiver import (
    NOT_ARRIVED,
    UpdateFailedError,
    UpdateRefusedError,
    WeightReceiver,
    parameter_specs,
)

INIT = WeightInitInfo(
    master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, timeout_s=5.0, key="weights/0a"
)
UPDATE = WeightUpdateInfo(
    names=["a", "b", "c"], dtype_names=["float32"] * 3, shapes=[[4]] * 3, bucket_bytes=16, timeout_s=5.0
)
"""Three buckets."""


class _Backend:
    """Buckets of zeros; waiting for bucket `breaks_at` raises `error`."""

    def __init__(self, events: list[str], *, breaks_at: int = -1, error: Exception | None = None) -> None:
        self.events, self._breaks_at, self._error = events, breaks_at, error
        self._number = 0

    def receive(self, num_bytes: int, *, timeout_s: float) -> Callable[[], torch.Tensor]:
        number, self._number = self._number, self._number + 1
        self.events.append(f"begin {number}")

        def wait() -> torch.Tensor:
            if number == self._breaks_at and self._error is not None:
                raise self._error
            self.events.append(f"got {number}")
            return torch.zeros(num_bytes, dtype=torch.uint8)

        return wait

    def close(self) -> None:
        self.events.append("closed")


@pytest.fixture
def events() -> list[str]:
    return []


def _receiver(monkeypatch: pytest.MonkeyPatch, backend: _Backend) -> WeightReceiver:
    monkeypatch.setattr(receiver_module, "join_group", lambda *_, **__: backend)
    receiver = WeightReceiver(device=torch.device("cpu"))
    receiver.join(INIT)
    return receiver


def _load(weights: Iterator[tuple[str, torch.Tensor]], events: list[str]) -> None:
    for name, tensor in weights:
        assert tensor.shape == (4,)
        events.append(f"load {name}")


def test_a_bucket_is_received_while_the_one_before_is_loaded_and_never_two_ahead(
    monkeypatch: pytest.MonkeyPatch, events: list[str]
) -> None:
    receiver = _receiver(monkeypatch, _Backend(events))
    _load(receiver.receive(UPDATE), events)
    assert events == [
        "begin 0", "begin 1", "got 0", "load a", "begin 2", "got 1", "load b", "got 2", "load c",
    ]  # fmt: skip


def test_an_update_that_breaks_off_takes_its_group_with_it(monkeypatch: pytest.MonkeyPatch, events: list[str]) -> None:
    receiver = _receiver(monkeypatch, _Backend(events, breaks_at=1, error=RuntimeError("connection reset by peer")))
    with pytest.raises(UpdateFailedError, match=rf"{NOT_ARRIVED} \(bucket 1\): connection reset"):
        _load(receiver.receive(UPDATE), events)
    assert events[-3:] == ["load a", "begin 2", "closed"]
    with pytest.raises(UpdateFailedError, match="no weight group"):
        next(receiver.receive(UPDATE))


@pytest.mark.parametrize("change", [{"dtype_names": ["float32", "float31", "float32"]}, {"shapes": [[4]]}])
def test_what_cannot_be_an_update_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(UpdateRefusedError, match=r"a dtype of .* and a shape per name"):
        parameter_specs(UPDATE.model_copy(update=change))
