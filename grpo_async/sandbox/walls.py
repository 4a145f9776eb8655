"""What the sandbox can hold on this machine, found by trying: a short program attacks each wall from inside, once per process.

Walls, strongest first; the next one is tried where the kernel, or a container around us, refuses one:

    namespaces + seccomp         its own root, processes, network, users; everything holds
    Landlock + seccomp           in most containers: no second process, so that nothing needs to be counted or found
    resource limits only         macOS, old kernels
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from grpo_async.sandbox.probe import Findings, try_walls

LIMITS, NETWORK, FILESYSTEM, PROCESSES, SIGNALS, TOTALS = (
    "limits",
    "network",
    "filesystem",
    "processes",
    "signals",
    "totals",
)
NAMES = (LIMITS, NETWORK, FILESYSTEM, PROCESSES, SIGNALS, TOTALS)

_CONSEQUENCES = {
    LIMITS: "one run can take the CPU, the memory or the disk of the machine",
    NETWORK: "model-written code can reach the network and every server on this machine",
    FILESYSTEM: "model-written code can read and change whatever this user can (keys, the repository, results)",
    PROCESSES: "model-written code can start processes without number, and some may outlive their run",
    SIGNALS: "model-written code can end or stop this user's other processes, the trainer included",
    TOTALS: "only each file and each process is limited, not the files and the memory of one run together",
}
_BY_NAMESPACES = {
    LIMITS: "resource limits",
    NETWORK: "network namespace",
    FILESYSTEM: "private root in memory",
    PROCESSES: "pid and user namespace",
    SIGNALS: "pid namespace",
    TOTALS: "tmpfs, watched memory",
}
_WITHOUT_NAMESPACES = {
    LIMITS: "resource limits",
    NETWORK: "system call filter",
    FILESYSTEM: "Landlock; names and sizes of files can be seen",
    PROCESSES: "system call filter: none beside the first",
    SIGNALS: "system call filter",
    TOTALS: "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One thing that the sandbox can hold, or not."""

    name: str
    is_available: bool
    how: str  # by what means; where it is not available: what was tried and the system's answer
    consequence: str  # what follows where it is not available


_lock = threading.Lock()
_findings: Findings | None = None


def findings() -> Findings:
    """What was found on this machine; tried at the first call (about half a second), then remembered.

    Raises:
        SandboxError: not even a plain process with limits can be run.
    """
    global _findings
    with _lock:
        if _findings is None:
            _findings = try_walls()
        return _findings


def capabilities() -> list[Capability]:
    """One entry for each of `limits`, `network`, `filesystem`, `processes`, `signals`, `totals`.

    Example: Capability(name="network", is_available=True, how="network namespace", consequence="...").
    """
    found = findings()
    means = _BY_NAMESPACES if "namespaces" in found.mechanisms else _WITHOUT_NAMESPACES
    held = {
        LIMITS: not found.passed & {"cpu", "memory", "file"},
        NETWORK: not found.passed & {"connect"},
        FILESYSTEM: not found.passed & {"read", "write"},
        # RLIMIT_NPROC alone may look as if it held: it counts all that this user runs just now.
        PROCESSES: bool(found.mechanisms & {"namespaces", "seccomp"})
        and not found.passed & {"processes", "threads", "daemon"},
        SIGNALS: not found.passed & {"signal"},
        TOTALS: not found.passed & {"directory", "together"},
    }
    refused = "; ".join(f"{mechanism}: {problem}" for mechanism, problem in found.refused.items())
    return [
        Capability(
            name=name,
            is_available=held[name],
            how=means[name] if held[name] else refused or "this system has no means for it",
            consequence=_CONSEQUENCES[name],
        )
        for name in NAMES
    ]


def describe() -> list[str]:
    """Lines for the start of a run: one for what holds, one for each thing that does not, and what follows from it."""
    found = capabilities()
    held = [f"{c.name} ({c.how})" for c in found if c.is_available]
    notes = [f"sandbox holds: {', '.join(held) or 'nothing'}"]
    for capability in found:
        if not capability.is_available:
            notes.append(f"sandbox does NOT hold {capability.name}: {capability.consequence} (tried: {capability.how})")
    return notes
