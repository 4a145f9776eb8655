"""Which transport brings the weights: what `weights.transport: auto` means on this machine, and why. Pure."""

from __future__ import annotations

from typing import Literal

from grpo_async.errors import ConfigError
from grpo_async.inference.surface import TransportKind


def choose_transport(
    wanted: TransportKind | Literal["auto"], *, trainer_device: str, server_device: str, shares_gpu: bool
) -> tuple[TransportKind, str]:
    """The transport, and the reason for it in words for the plan.

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
