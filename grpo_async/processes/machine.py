"""What the launcher asks of the machine: CPUs, GPUs, free ports. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from grpo_async.errors import ConfigError
from grpo_async.utils.cpus import usable_cpus
from grpo_async.utils.network import binding_error, family_of

_QUESTION_TIMEOUT_S = 60.0  # a driver that has to wake up takes seconds, and so does torch
_DEVICES = ("nvidia[0-9]*", "dxg")  # /dev/dxg: WSL2
_COUNT = "import torch; print(torch.cuda.device_count())"


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
    gpus, gpu_bytes = find_gpus()
    return Machine(
        num_cpus=usable_cpus(),
        gpus=gpus,
        gpu_bytes=gpu_bytes,
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


def find_gpus(environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, ...], int | None]:
    """Entries of CUDA_VISIBLE_DEVICES for the GPUs of this process, and the memory of the smallest in bytes (None: not known).

    The driver says what there is (nvidia-smi; where a container lacks it and has devices, torch), and CUDA_VISIBLE_DEVICES which of
    it is meant; as in CUDA an index that does not exist hides what follows it. A torch for CPUs alone can use none of them.

    Worked example: GPUs 0 to 3 and CUDA_VISIBLE_DEVICES=2,5,1 -> ("2",).
    """
    given = environment.get("CUDA_VISIBLE_DEVICES")
    wanted = None if given is None else [part.strip() for part in given.split(",")]
    if wanted is not None and wanted[0] in ("", "-1"):
        return (), None
    found = _ask_driver()
    if found is None:  # nobody knows but whoever set the variable
        return tuple(part for part in wanted or () if part and part != "-1"), None
    if found and is_torch_for_cpus():
        return (), None
    if wanted is None:
        return tuple(map(str, range(len(found)))), min(found, default=None) if all(found) else None
    visible: list[str] = []
    for part in wanted:
        if not part or (part.lstrip("-").isdecimal() and not 0 <= int(part) < len(found)):
            break
        visible.append(part)
    sizes = [found[int(part)] if part.isdecimal() else 0 for part in visible]  # 0: a UUID, perhaps of a slice
    return tuple(visible), min(sizes) if sizes and all(sizes) else None


def is_torch_for_cpus() -> bool:
    """By its version alone, "2.13.0+cpu"."""
    return importlib.metadata.version("torch").endswith("+cpu")


def _ask_driver() -> list[int] | None:
    """Memory of each GPU in bytes, in the order of their indices (0: not known); None: nobody can be asked."""
    try:
        lines = _output("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits").splitlines()
        return [int(line) << 20 if line.strip().isdecimal() else 0 for line in lines if line.strip()]
    except (OSError, subprocess.CalledProcessError):
        if not any(file for pattern in _DEVICES for file in Path("/dev").glob(pattern)):
            return None
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    return [0] * int(_output(sys.executable, "-c", _COUNT, environment=environment))


def _output(*command: str, environment: Mapping[str, str] | None = None) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_QUESTION_TIMEOUT_S, check=True, env=environment
        )
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{command[0]} has not answered for {_QUESTION_TIMEOUT_S:.0f} s: the driver of the GPUs hangs; fix it, or go on "
            "without them by an empty CUDA_VISIBLE_DEVICES"
        ) from error
    return done.stdout
