"""What `weights.transport` becomes on a machine, and why."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_async.errors import ConfigError
from grpo_async.weights.choice import choose_transport, problem_with_devices


@pytest.mark.parametrize(
    ("trainer", "server", "shares", "kind", "why"),
    [
        ("cpu", "cpu", False, "gloo", "trainer and server are on the CPU"),
        ("cuda", "cpu", False, "gloo", "the server is on the CPU"),
        ("cpu", "cuda", False, "gloo", "the trainer is on the CPU"),
        ("cuda:0", "cuda", True, "ipc", "trainer and server share a GPU"),
        ("cuda", "cuda", False, "nccl", "trainer and servers have GPUs of their own"),
    ],
)
def test_auto_takes_what_fits_and_says_why(trainer: str, server: str, shares: bool, kind: Any, why: str) -> None:
    where: Any = {"trainer_device": trainer, "server_device": server, "shares_gpu": shares}
    assert choose_transport("auto", **where) == (kind, why)
    assert choose_transport(kind, **where) == (kind, why)
    assert choose_transport("gloo", **where)[0] == "gloo"  # goes everywhere
    for wish in ("nccl", "ipc"):
        if wish != kind:
            with pytest.raises(
                ConfigError, match=f"weights.transport: {wish} is impossible, {why}; set {kind}, or auto"
            ):
                choose_transport(wish, **where)


def test_gloo_between_gpus_says_that_it_was_asked_for() -> None:
    _, why = choose_transport("gloo", trainer_device="cuda", server_device="cuda", shares_gpu=True)
    assert why == "weights.transport says so (auto would be ipc: trainer and server share a GPU)"


@pytest.mark.parametrize(
    ("kind", "devices", "problem"),
    [
        ("gloo", ["GPU-1", "GPU-1", "cpu"], None),
        ("nccl", ["GPU-1", "GPU-2", "GPU-3"], None),
        ("ipc", ["GPU-1", "GPU-1"], None),
        ("nccl", ["GPU-1", "GPU-2", "GPU-1"], "each member, the trainer and rank 2 are both on GPU-1; set ipc"),
        ("ipc", ["GPU-1", "GPU-1", "GPU-2"], "the trainer is on GPU-1, rank 2 on GPU-2; set nccl"),
        ("nccl", ["GPU-1", "cpu"], "rank 1 is on the CPU; set gloo"),
    ],
)
def test_a_group_of_gpus_that_cannot_form_says_what_to_set(kind: str, devices: list[str], problem: str | None) -> None:
    found = problem_with_devices(kind, devices)
    assert found is None if problem is None else found is not None and found.endswith(problem)
