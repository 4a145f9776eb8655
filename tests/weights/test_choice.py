"""What `weights.transport` becomes between given devices, and why."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_async.errors import ConfigError
from grpo_async.weights.choice import choose_transport, fitting_transport


@pytest.mark.parametrize(
    ("trainer", "workers", "kind", "why"),
    [
        ("cpu", ["cpu"], "gloo", "trainer and server are on the CPU"),
        ("GPU-1", ["GPU-2", "cpu"], "gloo", "the server is on the CPU"),
        ("cpu", ["GPU-1"], "gloo", "the trainer is on the CPU"),
        ("GPU-1", ["GPU-1", "GPU-1"], "ipc", "trainer and server share a GPU"),
        ("GPU-1", ["GPU-2", "GPU-3"], "nccl", "trainer and servers have separate GPUs"),
        ("GPU-1", ["GPU-2", "GPU-1"], "gloo", "some share a GPU and others do not"),
        ("GPU-1", ["GPU-2", "GPU-2"], "gloo", "some share a GPU and others do not"),
    ],
)
def test_what_fits_the_devices_is_taken_and_anything_else_but_gloo_refused(
    trainer: str, workers: list[str], kind: Any, why: str
) -> None:
    assert fitting_transport(trainer, workers)[0] == kind
    for wanted in ("auto", kind):
        found, reason = choose_transport(wanted, trainer, workers)
        assert (found, reason.startswith(why)) == (kind, True)
    found, reason = choose_transport("gloo", trainer, workers)  # goes everywhere
    assert found == "gloo"
    assert kind == "gloo" or f"weights.transport says so (auto would be {kind}: {why})" == reason
    for wish in {"nccl", "ipc"} - {kind}:
        expected = (
            rf"weights.transport: {wish} is impossible between {trainer} \(trainer\) and .*{why}.*; set {kind}, or auto"
        )
        with pytest.raises(ConfigError, match=expected):
            choose_transport(wish, trainer, workers)  # type: ignore[arg-type]
