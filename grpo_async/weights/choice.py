"""Which transport brings the weights: what `weights.transport: auto` means on this machine, and what is impossible. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from grpo_async.errors import ConfigError
from grpo_async.inference.api import TransportKind


def choose_transport(
    wanted: TransportKind | Literal["auto"], *, trainer_device: str, server_device: str, shares_gpu: bool
) -> tuple[TransportKind, str]:
    """The transport, and the reason for it, for the plan.

    Args:
        wanted: weights.transport.
        trainer_device: "cpu" or "cuda", where the trainer's weights are; `server_device` likewise.
        shares_gpu: a server is on a GPU of the trainer.

    Raises:
        ConfigError: `wanted` is impossible; says what to set instead.

    Worked example: auto with trainer and server on two GPUs -> ("nccl", "trainer and servers have GPUs of their own").
    """
    on_cpu = [
        name
        for name, device in (("trainer", trainer_device), ("server", server_device))
        if device.split(":")[0] == "cpu"
    ]
    if on_cpu:
        kind: TransportKind = "gloo"
        where = f"the {on_cpu[0]} is" if len(on_cpu) == 1 else "trainer and server are"
        why = f"{where} on the CPU"
    elif shares_gpu:
        kind, why = "ipc", "trainer and server share a GPU"
    else:
        kind, why = "nccl", "trainer and servers have GPUs of their own"
    if wanted in ("auto", kind):
        return kind, why
    if wanted == "gloo":
        return "gloo", f"weights.transport says so (auto would be {kind}: {why})"
    raise ConfigError(f"weights.transport: {wanted} is impossible, {why}; set {kind}, or auto")


def problem_with_devices(kind: str, devices: Sequence[str]) -> str | None:
    """Why members on these devices (by rank) cannot form a group of this kind, or None."""
    if kind == "gloo":
        return None
    if "cpu" in devices:
        return f"weights.transport: {kind} needs every member on a GPU, {_ranks(devices, 'cpu')} on the CPU; set gloo"
    if kind == "nccl":
        for device in devices:
            if devices.count(device) > 1:
                return f"weights.transport: nccl needs a GPU for each member, {_ranks(devices, device)} both on {device}; set ipc"
    if kind == "ipc":
        for rank, device in enumerate(devices):
            if device != devices[0]:
                return (
                    f"weights.transport: ipc needs all members on one GPU, the trainer is on {devices[0]}, rank {rank} on "
                    f"{device}; set nccl"
                )
    return None


def _ranks(devices: Sequence[str], device: str) -> str:
    """'the trainer and rank 2 are'."""
    names = ["the trainer" if rank == 0 else f"rank {rank}" for rank, other in enumerate(devices) if other == device]
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"
