"""Finds what the sandbox can enforce on this machine by trying: a short program attacks each restriction from inside, once per
process.

Restrictions, strongest first; the next one is tried if the kernel, or a container around us, refuses one:

    namespaces + seccomp         its own root, processes, network, users; everything is enforced
    Landlock + seccomp           in most containers: no second process, so nothing needs to be counted or found
    resource limits only         macOS, old kernels
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from grpo_async.sandbox.execution import (
    Job,
    SandboxError,
    SandboxLimits,
    execute,
    find_interpreter,
)
from grpo_async.sandbox.inside import LANDLOCK, NAMESPACES, SECCOMP, USER

NAMES = LIMITS, NETWORK, FILESYSTEM, PROCESSES, SIGNALS, TOTALS = (
    "limits",
    "network",
    "filesystem",
    "processes",
    "signals",
    "totals",
)

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
    PROCESSES: "system call filter: none besides the first",
    SIGNALS: "system call filter",
    TOTALS: "",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """One restriction that the sandbox can enforce here, or not."""

    name: str
    is_available: bool
    how: str  # the means; if it is not available, what was tried and the system's answer
    consequence: str  # the consequence if it is not available


_lock = threading.Lock()
_probed: ProbeResult | None = None


def probe_result() -> ProbeResult:
    """The restrictions that can be enforced on this machine; tried at the first call (about half a second), then cached.

    Raises:
        SandboxError: not even a plain process with limits can be run.
    """
    global _probed
    with _lock:
        if _probed is None:
            _probed = probe_restrictions()
        return _probed


def capabilities() -> list[Capability]:
    """One entry for each of `limits`, `network`, `filesystem`, `processes`, `signals`, `totals`.

    Example: Capability(name="network", is_available=True, how="network namespace", consequence="...").
    """
    found = probe_result()
    means = _BY_NAMESPACES if NAMESPACES in found.mechanisms else _WITHOUT_NAMESPACES
    is_enforced = {
        LIMITS: not found.passed & {"cpu", "memory", "file"},
        NETWORK: "connect" not in found.passed,
        FILESYSTEM: not found.passed & {"read", "write"},
        # RLIMIT_NPROC alone may seem to be enforced, because it counts all current processes of this user.
        PROCESSES: bool(found.mechanisms & {NAMESPACES, SECCOMP}) and "processes" not in found.passed,
        SIGNALS: "signal" not in found.passed,
        TOTALS: "totals" not in found.passed,
    }
    refused = "; ".join(f"{mechanism}: {problem}" for mechanism, problem in found.refused.items())
    return [
        Capability(
            name=name,
            is_available=is_enforced[name],
            how=means[name] if is_enforced[name] else refused or "this system has no means for it",
            consequence=_CONSEQUENCES[name],
        )
        for name in NAMES
    ]


# ------------------------------------------------------------------------------------------------ trying them

_LIMITS = SandboxLimits(wall_s=60.0, cpu_s=30.0, memory_mb=256, file_mb=1, directory_mb=4, max_processes=8)
# The restriction to drop next when a start fails for a reason that names none.
_SUSPECTS = (USER, LANDLOCK, NAMESPACES, SECCOMP)

PROGRAM = """
import json, os, socket
given = json.load(open("given.json"))
passed = []

def attempt(name, action):
    try:
        action()
    except (OSError, MemoryError):
        return
    passed.append(name)

def write():
    with open("large", "wb", buffering=0) as file:
        for _ in range(2 * given["file_mb"] * 16):
            if file.write(bytes(65536)) != 65536:
                raise OSError("short")

def fork():
    hold, release = os.pipe()
    children = []
    try:
        for _ in range(given["many"]):
            children.append(os.fork())
            if children[-1] == 0:
                os.close(release)
                os.read(hold, 1)
                os._exit(0)
    finally:
        os.close(release)
        for child in children:
            os.waitpid(child, 0)

attempt("connect", lambda: socket.create_connection(("127.0.0.1", given["port"]), 5).close())
attempt("read", lambda: open(given["secret"]).close())
attempt("write", lambda: os.mkdir(given["beside"]))
attempt("signal", lambda: os.kill(given["pid"], 9))
attempt("memory", lambda: bytearray(2 * given["memory_mb"] << 20))
attempt("file", write)
attempt("processes", fork)
print(json.dumps(passed), flush=True)
os._exit(0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """The restrictions that can be set up, and the attacks that succeeded despite them."""

    mechanisms: frozenset[str]
    passed: frozenset[str]  # names of PROGRAM's attacks that succeeded
    refused: Mapping[str, str]  # mechanism -> the system's answer


def probe_restrictions(*, without: frozenset[str] = frozenset()) -> ProbeResult:
    """Find the strongest restrictions that can be set up here.

    Args:
        without: mechanisms to treat as if the system refused them.

    Raises:
        SandboxError: not even a plain process with limits can be run.
    """
    refused: dict[str, str] = dict.fromkeys(sorted(without), "not tried")
    while True:
        mechanisms = _candidates() - refused.keys()
        if NAMESPACES in mechanisms:
            mechanisms -= {LANDLOCK, USER}  # namespaces enforce the same, and better
        try:
            passed = _attack(mechanisms)
        except SandboxError as error:
            suspect = error.mechanism
            if suspect not in mechanisms:
                suspect = next((name for name in _SUSPECTS if name in mechanisms), None)
            if suspect is None:
                raise
            refused[suspect] = str(error)
        else:
            return ProbeResult(mechanisms=mechanisms, passed=passed, refused=refused)


def _candidates() -> frozenset[str]:
    if sys.platform != "linux":
        return frozenset()
    return frozenset({NAMESPACES, SECCOMP, LANDLOCK} | ({USER} if os.geteuid() == 0 else set()))


def _attack(mechanisms: frozenset[str]) -> frozenset[str]:
    """Run the program under these restrictions; returns the attacks that succeeded."""
    with contextlib.ExitStack() as stack:
        outside = stack.enter_context(tempfile.TemporaryDirectory(prefix="grpo-async-probe-"))
        os.chmod(outside, 0o777)  # tests the restriction, not the permissions
        secret = os.path.join(outside, "secret")
        with open(secret, "w", encoding="ascii") as file:
            file.write("secret")
        os.chmod(secret, 0o644)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        victim = stack.enter_context(_victim())
        given = {
            "port": listener.getsockname()[1],
            "secret": secret,
            "beside": os.path.join(outside, "made"),
            "pid": victim.pid,
            "many": 2 * _LIMITS.max_processes,
            "memory_mb": _LIMITS.memory_mb,
            "file_mb": _LIMITS.file_mb,
        }
        job = Job(
            code=PROGRAM,
            files={"given.json": json.dumps(given).encode()},
            limits=_LIMITS,
            interpreter=find_interpreter(),
            mechanisms=mechanisms,
        )
        with ThreadPoolExecutor(1, "sandbox") as threads:  # this thread may already run an event loop
            result, notes = threads.submit(asyncio.run, execute(job)).result()  # limited by the run's wall_s
    try:
        passed = set(json.loads(result.stdout))
    except ValueError as error:
        raise SandboxError(
            f"a trial run gave no result: {result.status}, exit code {result.exit_code}. {result.stderr[-500:]}"
        ) from error
    if NAMESPACES not in mechanisms or "proc /proc cannot be mounted" in notes:
        passed.add("totals")  # nothing counts the files and the memory of all processes together
    if any(note.startswith("limits RLIMIT_CPU") for note in notes):
        passed.add("cpu")
    return frozenset(passed)


@contextlib.contextmanager
def _victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process outside that the program tries to kill."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", "import sys; sys.stdin.read()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGKILL)
        process.wait(10.0)
        if process.stdin is not None:
            process.stdin.close()
