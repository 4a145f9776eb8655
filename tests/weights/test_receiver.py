"""A worker's end of weight updates alone, with a backend that does as a test says."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from grpo_async.inference.api import WeightInitInfo, WeightUpdateInfo
from grpo_async.weights import receiver as receiver_module
from grpo_async.weights.receiver import (
    WeightReceiver,
)

INIT = WeightInitInfo(
    master_address="127.0.0.1", master_port=1, rank_offset=1, world_size=2, timeout_s=5.0, key="weights/0a"
)
UPDATE = WeightUpdateInfo(
    names=["a", "b", "c"], dtype_names=["float32"] * 3, shapes=[[4]] * 3, bucket_bytes=16, timeout_s=5.0
)
"""Three buckets."""


class _Backend:
    """Buckets of zeros."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self._number = 0

    def receive(self, num_bytes: int, *, timeout_s: float) -> Callable[[], torch.Tensor]:
        number, self._number = self._number if self._number < 3 else "digests", self._number + 1
        self.events.append(f"begin {number}")

        def wait() -> torch.Tensor:
            self.events.append(f"got {number}")
            return torch.zeros(num_bytes, dtype=torch.uint8)

        return wait

    def close(self) -> None: ...


def test_a_bucket_is_received_while_the_one_before_is_loaded_and_never_two_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend, receiver = _Backend(), WeightReceiver(device=torch.device("cpu"))
    monkeypatch.setattr(receiver_module, "join_group", lambda *_, **__: backend)
    receiver.join(INIT)
    for name, tensor in receiver.receive(UPDATE):
        assert tensor.shape == (4,)
        backend.events.append(f"load {name}")
    assert backend.events == [
        "begin 0", "begin 1", "got 0", "load a", "begin 2", "got 1", "load b", "begin digests", "got 2", "load c", "got digests",
    ]  # fmt: skip
