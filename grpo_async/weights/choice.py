"""Which transport brings the weights: what `weights.transport: auto` means on this machine, and what is impossible. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from grpo_async.config.base import TransportKind
from grpo_async.errors import ConfigError


def fitting_transport(trainer: str, workers: Sequence[str]) -> tuple[TransportKind, str]:
    """The fastest transport between the trainer's rank 0 and the servers' workers, and why it is that one. Beside it only gloo
    works.

    Args:
        trainer: "cpu", or what names its GPU on all processes.
        workers: likewise, at least one.

    Worked example: "GPU-1" and ["GPU-2"] -> ("nccl", "trainer and servers have separate GPUs").
    """
    if "cpu" in (trainer, *workers):
        if trainer != "cpu":
            return "gloo", "the server is on the CPU"
        return "gloo", "trainer and server are on the CPU" if "cpu" in workers else "the trainer is on the CPU"
    distinct = {trainer, *workers}
    if len(distinct) == 1:
        return "ipc", "trainer and server share a GPU"
    if len(distinct) == 1 + len(workers):
        return "nccl", "trainer and servers have separate GPUs"
    return (
        "gloo",
        "some share a GPU and others do not, which neither nccl (one process per GPU) nor ipc (one GPU) supports",
    )


def choose_transport(
    wanted: Literal["auto", TransportKind], trainer: str, workers: Sequence[str]
) -> tuple[TransportKind, str]:
    """The transport, and the reason for it, for the plan.

    Args:
        wanted: weights.transport.
        trainer, workers: see `fitting_transport`.

    Raises:
        ConfigError: `wanted` is impossible; says what to set instead.
    """
    transport, why = fitting_transport(trainer, workers)
    if wanted in ("auto", transport):
        return transport, why
    if wanted == "gloo":
        return "gloo", f"weights.transport says so (auto would be {transport}: {why})"
    devices = f"{trainer} (trainer) and {', '.join(workers)}"
    raise ConfigError(
        f"weights.transport: {wanted} is impossible between {devices}, because {why}; set {transport}, or auto"
    )
