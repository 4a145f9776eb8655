"""Network namespaces of Linux, one for each node of a cluster: what one has on loopback, the others do not see."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

BRIDGE, SUBNET = "grpo-br0", "10.77.0"
_NEWNET = 0x40000000  # CLONE_NEWNET of sched.h


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30.0)


@contextmanager
def network(number: int) -> Iterator[list[tuple[str, str]]]:
    """A bridge of this machine, with the address `SUBNET`.1, and `number` namespaces on it: the name and the address of each.

    Raises:
        OSError, subprocess.CalledProcessError: not root, or there is no command `ip`.
    """
    # one that a process still holds may outlive this, so the next test needs other names
    nodes = [(f"grpo{os.getpid()}-{index}", f"{SUBNET}.{index}") for index in range(2, 2 + number)]
    _ip("link", "add", BRIDGE, "type", "bridge")
    try:
        _ip("addr", "add", f"{SUBNET}.1/24", "dev", BRIDGE)
        _ip("link", "set", BRIDGE, "up")
        for name, address in nodes:
            _ip("netns", "add", name)
            _ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
            _ip("link", "set", name, "master", BRIDGE, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield nodes
    finally:
        for name, _ in nodes:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True, timeout=30.0)
        _ip("link", "del", BRIDGE)


@contextmanager
def inside(name: str | None) -> Iterator[None]:
    """Processes that this thread starts meanwhile are in the namespace `name`; None: where they would be anyway."""
    if name is None:
        yield
        return
    own = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    other = os.open(f"/run/netns/{name}", os.O_RDONLY)
    try:
        _enter(other)
        try:
            yield
        finally:
            _enter(own)
    finally:
        os.close(own)
        os.close(other)


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)  # os.setns came with Python 3.12
    if libc.setns(namespace, _NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "setns")
