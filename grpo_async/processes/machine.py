"""What a run needs to know of its machine: CPUs, GPUs, free ports, addresses. Imports no torch."""

from __future__ import annotations

import importlib.metadata
import os
import socket
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from grpo_async.config import ExperimentConfig
from grpo_async.errors import ConfigError, RunError
from grpo_async.utils.network import LOOPBACK, family_of, is_loopback, own_address_towards
from grpo_async.utils.processes import is_cpu_build, usable_cpus

_QUESTION_TIMEOUT_S = 60.0  # a driver that has to wake up takes seconds
_DEVICES = ("nvidia[0-9]*", "dxg")  # /dev/dxg: WSL2


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What the plan takes from the machine. `gpus` are the entries of CUDA_VISIBLE_DEVICES that the run may use, `gpu_bytes` is the
    memory of the smallest (None: not known)."""

    num_cpus: int = 1
    gpus: tuple[str, ...] = ()
    gpu_bytes: int | None = None


def inspect_machine() -> Machine:
    gpus, gpu_bytes = find_gpus()
    return Machine(num_cpus=usable_cpus(), gpus=gpus, gpu_bytes=gpu_bytes)


def free_ports(host: str, count: int) -> tuple[int, ...]:
    """`count` different ports that nobody listens on at `host` now. Raises ConfigError: it is no address of this machine."""
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


# ---- addresses ----


def interface_of(address: str) -> str | None:
    """Name of the network interface that has `address`: "127.0.0.1" -> "lo"; None where none has it."""
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return None


def weights_host(config: ExperimentConfig, urls: Sequence[str], own_address: str = "") -> str:
    """Master address of the weight group: `weights.host`, else the address of this machine that the first of `urls` on another
    machine reaches, else `own_address` in a cluster, else loopback. Only right on the machine of trainer rank 0.

    Raises:
        ConfigError: that server's name is not known, or no route leads there.
    """
    if config.weights.host is not None:
        return config.weights.host
    for url in filter(None, urls):
        parts = urlsplit(url)
        if is_loopback(parts.hostname or ""):
            continue
        try:
            found = socket.getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM)
            address = str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])
            return own_address_towards(address, parts.port or 80)
        except OSError as error:
            raise ConfigError(f"the server {url} cannot be reached from this machine: {error}") from error
    return own_address or LOOPBACK


# ---- GPUs ----


def find_gpus(environment: Mapping[str, str] = os.environ) -> tuple[tuple[str, ...], int | None]:
    """Return the entries of CUDA_VISIBLE_DEVICES for the GPUs of this process, and the memory in bytes of the smallest GPU that the
    machine has (None: it is not known).

    nvidia-smi says what there is, and CUDA_VISIBLE_DEVICES which of it is meant; as in CUDA an index that does not exist hides what
    follows it. A torch built for CPUs can use none of them.

    Worked example: GPUs 0 to 3 and CUDA_VISIBLE_DEVICES=2,5,1 -> ("2",).
    """
    given = environment.get("CUDA_VISIBLE_DEVICES")
    wanted = None if given is None else [part.strip() for part in given.split(",")]
    if is_torch_for_cpus() or (wanted is not None and wanted[0] in ("", "-1")):
        return (), None
    try:
        sizes = [int(size) << 20 if size.isdecimal() else 0 for (size,) in query_gpus("memory.total")]
    except RunError as error:
        if wanted is not None:  # the variable is all that is known
            return tuple(takewhile(lambda part: part not in ("", "-1"), wanted)), None
        if has_gpu_devices():
            raise ConfigError(
                f"this machine has GPUs, and {error}, or say in CUDA_VISIBLE_DEVICES which to use"
            ) from error
        return (), None

    def is_there(part: str) -> bool:  # a UUID, perhaps of a slice, is believed
        return bool(part) and (not part.lstrip("-").isdecimal() or 0 <= int(part) < len(sizes))

    visible = tuple(map(str, range(len(sizes)))) if wanted is None else tuple(takewhile(is_there, wanted))
    return visible, min(sizes) if visible and all(sizes) else None


def has_gpu_devices() -> bool:
    """Whether the kernel or the container has an NVIDIA GPU for us, even if its driver does not work."""
    return any(file for pattern in _DEVICES for file in Path("/dev").glob(pattern))


def is_torch_for_cpus() -> bool:
    return is_cpu_build(importlib.metadata.version("torch"))


def query_gpus(*fields: str, timeout_s: float = _QUESTION_TIMEOUT_S) -> list[list[str]]:
    """What nvidia-smi says of each GPU: a row of `fields`, in the order of the PCI bus.

    Raises:
        RunError: it cannot be started (it is not in PATH), or fails.
        ConfigError: it does not answer.
    """
    command = ("nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL
        )
    except OSError as error:
        raise RunError(f"nvidia-smi cannot be started: {error}; put it into PATH") from error
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"nvidia-smi timed out after {timeout_s:g} s: the driver of the GPUs hangs; restart the machine, or run without "
            "GPUs: set CUDA_VISIBLE_DEVICES to an empty string"
        ) from error
    if done.returncode != 0:
        said = (done.stdout + done.stderr).strip()[-300:] or "no message"
        raise RunError(
            f"nvidia-smi failed: {said}; if the driver and the kernel module do not match, reinstall the driver"
        )
    return [[part.strip() for part in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
