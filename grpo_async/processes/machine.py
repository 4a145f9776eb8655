"""What the launcher asks of the machine: CPUs, GPUs, free ports. Imports no torch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from grpo_async.errors import ConfigError
from grpo_async.utils.network import binding_error, family_of

_NVIDIA = Path("/proc/driver/nvidia/gpus")
_NVIDIA_SMI_TIMEOUT_S = 30.0  # a driver that has to wake up takes seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the plan takes from the machine. `gpus` are the entries of CUDA_VISIBLE_DEVICES that may be given away."""

    num_cpus: int = 1
    gpus: tuple[str, ...] = ()
    gpu_bytes: int | None = None
    """Memory of the smallest GPU; None: no GPU, or not known."""
    python: str = sys.executable
    working_dir: Path = field(default_factory=Path)
    python_path: str = ""
    """The caller's PYTHONPATH."""


def inspect() -> Machine:
    """This machine, as the plan sees it."""
    gpus = _gpus()
    return Machine(
        num_cpus=len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1,
        gpus=gpus,
        gpu_bytes=_smallest_gpu_bytes(gpus),
        python=sys.executable,
        working_dir=Path.cwd(),
        python_path=os.environ.get("PYTHONPATH", ""),
    )


def free_ports(host: str, count: int) -> tuple[int, ...]:
    """`count` different ports that nobody listens on at `host` now.

    Raises:
        ConfigError: `host` is no address of this machine.
    """
    ports = []
    with ExitStack() as held:  # all at once: a port that was let go may be given out again
        for _ in range(count):
            probe = held.enter_context(socket.socket(family_of(host), socket.SOCK_STREAM))
            try:
                probe.bind((host, 0))
            except OSError as error:
                raise ConfigError(
                    f"inference.host: {host} cannot be bound on this machine ({error}); try 127.0.0.1"
                ) from error
            ports.append(int(probe.getsockname()[1]))
    return tuple(ports)


def check_can_listen(address: str, port: int, setting: str) -> None:
    """Look whether `address`:`port` can be bound.

    Raises:
        ConfigError: it is no address of this machine, or the port is taken; `setting` is where it stands.
    """
    if (error := binding_error(address, port)) is not None:
        raise ConfigError(
            f"{setting}: {address}:{port} cannot be bound on this machine, which is node 0 ({error}); name an address of "
            "this machine and a port that nothing uses"
        ) from error


def _gpus() -> tuple[str, ...]:
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return tuple(part.strip() for part in given.split(",") if part.strip() and part.strip() != "-1")
    return tuple(str(index) for index in range(len(list(_NVIDIA.iterdir())))) if _NVIDIA.is_dir() else ()


def _smallest_gpu_bytes(gpus: Sequence[str]) -> int | None:
    """Memory of the smallest of `gpus` in bytes, as nvidia-smi says; None where it cannot say."""
    if not gpus:
        return None
    command = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits", f"--id={','.join(gpus)}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_TIMEOUT_S, check=True)
        return min(int(line) for line in done.stdout.split()) << 20
    except (OSError, subprocess.SubprocessError, ValueError):
        return None  # not there, or a slice of a GPU, of which it does not say the size
