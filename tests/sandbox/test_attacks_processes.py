"""Code that multiplies, outlives its run, or reaches for other processes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.sandbox.support import TRIAL, run
from tests.support.waiting import eventually, is_alive


def _runs_code(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[-1].endswith("/main.py")
    except (psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):
        return False


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours outside."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait(10)
    assert process.stdin is not None
    process.stdin.close()


def test_no_process_and_no_thread_is_started() -> None:
    code = f"""{TRIAL}
import ctypes, os, subprocess, sys, threading
trial(os.fork)
trial(lambda: subprocess.run([sys.executable, "-c", ""]))
trial(threading.Thread(target=print).start)
libc = ctypes.CDLL(None, use_errno=True)
print([libc.syscall(number, 0x10D00, 0, 0, 0, 0) for number in (56, 220, 435)])  # clone, also as a thread; clone3
"""
    assert run(code).stdout == "PermissionError\nPermissionError\nRuntimeError\n[-1, -1, -1]\n"


def test_the_run_dies_with_the_thread_that_started_it(tmp_path: Path) -> None:
    """As when the trainer is killed: nobody is left to keep the time."""
    code = f"""
import asyncio, os, sys, threading
sys.path.insert(0, {os.getcwd()!r})
from grpo_async.sandbox import Sandbox, SandboxLimits
sandbox = Sandbox(SandboxLimits(wall_s=120))
code = "import sys, time\\nsys.stdout.write('up')\\nsys.stdout.flush()\\ntime.sleep(100)"
threading.Thread(target=asyncio.run, args=(sandbox.run(code),), daemon=True).start()
sys.stdin.read()
"""
    tmp_path.chmod(0o755)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}  # a directory on disk has nobody left to remove it
    owner = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, env=environment)
    try:
        of_owner = psutil.Process(owner.pid)
        assert eventually(lambda: any(_runs_code(p) for p in of_owner.children(recursive=True)))
        family = of_owner.children(recursive=True)
    finally:
        owner.kill()
        owner.wait(10)
        assert owner.stdin is not None
        owner.stdin.close()
    assert eventually(lambda: not any(is_alive(p.pid) for p in family))


def test_other_processes_are_not_seen(victim: subprocess.Popen[bytes]) -> None:
    code = f"""
import os
try:
    print([name for name in os.listdir("/proc") if name.isdigit() and int(name) > 20])
except OSError:
    print([])
for path in ("/proc/{victim.pid}/cmdline", "/proc/{os.getpid()}/environ", "/proc/1/environ", "/proc/1/mem"):
    try:
        print(open(path, "rb").read(10))
    except OSError:
        print("hidden")
"""
    assert run(code).stdout == "[]\n" + "hidden\n" * 4


def test_the_code_has_no_privileges_and_a_sandbox_in_the_sandbox_gains_nothing() -> None:
    """New namespaces would give the code capabilities over them, and the kernel more to attack."""
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for flags in (0x10000000, 0x00020000, 0x40000000, 0x20000000):
    print(libc.unshare(flags), ctypes.get_errno())
print(libc.mount(b"none", b"/tmp", b"tmpfs", 0, None), ctypes.get_errno())
print(libc.syscall(56, 0x10000000 | 17, 0, 0, 0, 0) if os.uname().machine == "x86_64" else -1)
header, data = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
print(libc.capget(header, data), list(data), libc.prctl(39, 0, 0, 0, 0))
"""
    assert run(code).stdout == "-1 1\n" * 5 + "-1\n" + "0 [0, 0, 0, 0, 0, 0] 1\n"


def test_processes_outside_can_be_neither_signaled_nor_read_nor_limited(victim: subprocess.Popen[bytes]) -> None:
    """Those of this user, the owner, the launcher and init too: init would end with its CPU time, and a run that ends so looks like
    a fault of the machine."""
    code = f"""{TRIAL}
import ctypes, os, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.restype = ctypes.c_long
buffer = ctypes.create_string_buffer(8)
vector = (ctypes.c_uint64 * 2)(ctypes.addressof(buffer), 8)
def call(name, *arguments):
    if getattr(libc, name)(*arguments) == -1:
        raise OSError(ctypes.get_errno(), name)
trial(lambda: os.kill({victim.pid}, signal.SIGKILL))
trial(lambda: os.killpg({os.getpgid(victim.pid)}, signal.SIGURG))
for pid in ({os.getpid()}, os.getppid() or 1, 1, -1):
    trial(lambda: os.kill(pid, signal.SIGURG))
trial(lambda: signal.pidfd_send_signal(os.pidfd_open({victim.pid}), signal.SIGKILL))
for pid in ({victim.pid}, {os.getpid()}, os.getppid()):
    trial(lambda: call("ptrace", 16, pid, None, None))  # PTRACE_ATTACH
trial(lambda: call("process_vm_readv", {os.getpid()}, vector, 1, vector, 1, 0))
for pid in ({victim.pid}, os.getppid() or {victim.pid}):
    trial(lambda: resource.prlimit(pid, resource.RLIMIT_CPU, (1, 1)))
trial(lambda: os.setpriority(os.PRIO_PROCESS, {victim.pid}, 19))
trial(lambda: os.sched_setaffinity({victim.pid}, {{0}}))
trial(lambda: os.sched_setscheduler({victim.pid}, os.SCHED_IDLE, os.sched_param(0)))
"""
    result = run(code)
    assert len(result.stdout.splitlines()) == 16
    assert "went through" not in result.stdout
    assert victim.poll() is None
    assert psutil.Process(victim.pid).rlimit(psutil.RLIMIT_CPU) == (-1, -1)
    assert os.getpriority(os.PRIO_PROCESS, victim.pid) == os.getpriority(os.PRIO_PROCESS, 0)
