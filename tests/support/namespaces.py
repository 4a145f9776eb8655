"""Machines of a small network, each a network namespace of this one: a bridge in the middle, one address for each.

    with machines("10.77.0.1", "10.77.0.2") as (one, two):
        one.popen([sys.executable, "-m", ...])

Needs root and Linux; `why_not` says what is missing. The namespaces live as long as the processes that hold them.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

_LISTEN = "0A"
_PREFIX = 24


@dataclass(frozen=True)
class Machine:
    """One namespace. `holder` is the process that keeps it alive."""

    address: str
    holder: int

    def command(self, *words: str) -> list[str]:
        """`words` as a command line that runs in this machine; the process is the same one (nsenter replaces itself)."""
        return ["nsenter", f"--net=/proc/{self.holder}/ns/net", "--", *words]

    def popen(self, words: Sequence[str], **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(self.command(*words), text=True, **options)

    def listening(self) -> set[str]:
        """Addresses that something in this machine listens on now (TCP)."""
        found: set[str] = set()
        for name in ("tcp", "tcp6"):
            for line in Path(f"/proc/{self.holder}/net/{name}").read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTEN:
                    found.add(_address(fields[1].partition(":")[0]))
        return found


def why_not() -> str | None:
    """Why there can be no namespaces on this machine, or None."""
    if sys.platform != "linux":
        return "network namespaces are a thing of Linux"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for program in ("unshare", "nsenter"):
        if shutil.which(program) is None:
            return f"{program} (util-linux) is not installed"
    try:
        with machines("10.78.0.1", "10.78.0.2"):
            return None
    except (OSError, RuntimeError, subprocess.SubprocessError) as error:
        return f"the kernel gives no namespace with a bridge: {error}"
    except Exception as error:  # noqa: BLE001 - pyroute2's errors have no common base
        return f"the kernel gives no namespace with a bridge: {type(error).__name__}: {error}"


@contextlib.contextmanager
def machines(*addresses: str) -> Iterator[list[Machine]]:
    """Machines with these IPv4 addresses in one network; every process in them is killed at the end."""
    from pyroute2 import NetNS

    with contextlib.ExitStack() as stack:
        holders = [_hold(stack) for _ in range(len(addresses) + 1)]
        *ends, middle = holders
        bridge = stack.enter_context(contextlib.closing(NetNS(f"/proc/{middle}/ns/net", flags=0)))
        bridge.link("add", ifname="br0", kind="bridge")
        (index,) = bridge.link_lookup(ifname="br0")
        bridge.link("set", index=index, state="up")
        for number, (address, holder) in enumerate(zip(addresses, ends, strict=True)):
            port = f"port{number}"
            bridge.link("add", ifname=port, kind="veth", peer={"ifname": "eth0", "net_ns_pid": holder})
            (end,) = bridge.link_lookup(ifname=port)
            bridge.link("set", index=end, master=index, state="up")
            with contextlib.closing(NetNS(f"/proc/{holder}/ns/net", flags=0)) as inside:
                for name in ("lo", "eth0"):
                    (link,) = inside.link_lookup(ifname=name)
                    if name == "eth0":
                        inside.addr("add", index=link, address=address, prefixlen=_PREFIX)
                    inside.link("set", index=link, state="up")
        found = [Machine(address=address, holder=holder) for address, holder in zip(addresses, ends, strict=True)]
        try:
            yield found
        finally:
            _kill_all_in({_namespace(holder) for holder in holders})


def _hold(stack: contextlib.ExitStack) -> int:
    """Start a process in a new namespace; returns its pid when it is there."""
    program = [sys.executable, "-c", "import signal; print('here', flush=True); signal.pause()"]
    process = subprocess.Popen(["unshare", "--net", "--", *program], stdout=subprocess.PIPE, text=True)
    stack.callback(_end, process)
    assert process.stdout is not None
    if process.stdout.readline() != "here\n":
        raise RuntimeError("unshare --net failed")
    return process.pid


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait(10.0)
    assert process.stdout is not None
    process.stdout.close()


def _namespace(pid: int) -> str:
    return os.readlink(f"/proc/{pid}/ns/net")


def _kill_all_in(namespaces: set[str]) -> None:
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            with contextlib.suppress(OSError):
                if os.readlink(folder / "ns" / "net") in namespaces:
                    os.kill(int(folder.name), signal.SIGKILL)


def _address(text: str) -> str:
    """As /proc/net/tcp writes it: 32-bit words in the byte order of the machine. "0100007F" -> "127.0.0.1"."""
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    packed = b"".join(words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    address = ip_address(socket.inet_ntop(family, packed))
    return str(getattr(address, "ipv4_mapped", None) or address)
