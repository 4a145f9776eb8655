"""Code that reads, writes, leaves behind, calls or takes what it should not. Every bomb is bounded, so that a restriction that
fails costs the test and not the machine."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from grpo_async.sandbox import SandboxStatus
from tests.sandbox.support import TRIAL, marked, run
from tests.support.waiting import eventually, is_alive

# -- files


def test_files_and_directories_outside_are_not_read(tmp_path: Path) -> None:
    key = tmp_path / ".ssh" / "id_ed25519"
    key.parent.mkdir()
    key.write_text("private", encoding="utf-8")
    for path in (tmp_path, key.parent):
        path.chmod(0o755)
    paths = [str(key), "/etc/shadow", "/etc/passwd", __file__, os.path.expanduser("~/.bashrc"), "/proc/1/environ"]
    folders = [str(tmp_path), os.getcwd(), "/home", "/var"]
    code = f"{TRIAL}\nimport os\nfor path in {paths}:\n    trial(lambda: open(path).read(1))\n"
    code += f"for path in {folders}:\n    trial(lambda: os.listdir(path))"
    assert "went through" not in run(code).stdout
    assert run("import grpo_async").last_error_line == "ModuleNotFoundError: No module named 'grpo_async'"


def test_nothing_outside_is_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    (tmp_path / "kept").write_text("whole", encoding="utf-8")
    code = f"""{TRIAL}
import os
kept = {str(tmp_path / "kept")!r}
trial(lambda: open(kept, "w"))
trial(lambda: open(kept + ".new", "x"))
trial(lambda: os.truncate(kept, 0))
trial(lambda: os.remove(kept))
trial(lambda: os.rename(kept, "mine"))
trial(lambda: os.mkdir(kept + ".dir"))
trial(lambda: os.chmod(kept, 0o000))
trial(lambda: os.utime(kept, (0, 0)))
trial(lambda: os.chown(kept, 1, 1))
trial(lambda: os.setxattr(kept, "user.a", b"1"))
"""
    before = os.stat(tmp_path / "kept")
    assert "went through" not in run(code).stdout
    assert os.stat(tmp_path / "kept") == before
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_links_lead_nowhere(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret", encoding="utf-8")
    tmp_path.chmod(0o755)
    code = f"""{TRIAL}
import os
secret = {str(tmp_path / "secret")!r}
os.symlink(secret, "soft")
os.symlink("/", "root")
os.symlink("../" * 20 + secret, "up")
for path in ("soft", "root" + secret, "up", "../" * 20 + secret):
    trial(lambda: open(path).read())
trial(lambda: os.link(secret, "hard"))
trial(lambda: os.chroot("."))
"""
    assert "went through" not in run(code).stdout


def test_devices_other_than_the_harmless_ones_are_not_there() -> None:
    code = f"""{TRIAL}
import os
for name in ("null", "zero", "urandom"):
    open("/dev/" + name, "rb").read(1)
open("/dev/null", "w").write("x")
for name in ("mem", "kmsg", "tty", "ptmx", "vda", "sda", "kvm", "fuse"):
    trial(lambda: open("/dev/" + name))
trial(lambda: os.mknod("disk", 0o60666, os.makedev(8, 0)))
"""
    result = run(code)
    assert result.status is SandboxStatus.OK
    assert "went through" not in result.stdout


# -- network


def test_a_server_on_this_machine_is_not_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code = f"""{TRIAL}
import socket
def connect(family, kind):
    with socket.socket(family, kind) as client:
        client.settimeout(5)
        client.connect(("127.0.0.1", {port}))
        client.send(b"x")
trial(lambda: connect(socket.AF_INET, socket.SOCK_STREAM))
trial(lambda: connect(socket.AF_INET, socket.SOCK_DGRAM))
"""
        assert "went through" not in run(code).stdout
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()


def test_no_kind_of_socket_can_be_made() -> None:
    """Of IP, Unix, netlink, packets, crypto, vsock."""
    code = f"""{TRIAL}
import socket
for family in (1, 2, 10, 16, 17, 38, 40):
    trial(lambda: socket.socket(family, socket.SOCK_RAW if family in (16, 17) else socket.SOCK_STREAM))
a, b = socket.socketpair()
a.send(b"x")
print(b.recv(1))
"""
    assert run(code).stdout == "PermissionError\n" * 7 + "b'x'\n"


# -- processes

_MARK = "sandbox-test-mark"


def _runs_code(process: psutil.Process) -> bool:
    try:
        return process.cmdline()[-1].endswith("/main.py")
    except (psutil.NoSuchProcess, psutil.ZombieProcess, IndexError):
        return False


@pytest.fixture
def victim() -> Iterator[subprocess.Popen[bytes]]:
    """A process of ours outside."""
    process = subprocess.Popen([sys.executable, "-c", "input()", _MARK], stdin=subprocess.PIPE)
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


@pytest.mark.parametrize("ending", ["print('done')", "time.sleep(60)"])
def test_a_daemon_does_not_outlive_its_run(ending: str) -> None:
    code = f"""
import os, sys, time
def fork():
    try:
        return os.fork()
    except OSError:
        return None
if fork() == 0:
    os.setsid()
    if fork() == 0:
        for number in range(3):
            os.close(number)
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(30)", "{_MARK}-daemon"])
    os._exit(0)
time.sleep(0.3)
{ending}
"""
    run(code, wall_s=1.0)
    assert eventually(lambda: not marked(f"{_MARK}-daemon"), timeout_s=5.0)


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
    assert len(result.stdout.splitlines()) == 12
    assert "went through" not in result.stdout
    assert victim.poll() is None
    assert psutil.Process(victim.pid).rlimit(psutil.RLIMIT_CPU) == (-1, -1)
    assert os.getpriority(os.PRIO_PROCESS, victim.pid) == os.getpriority(os.PRIO_PROCESS, 0)


# -- resources

_LOADED_WALL_S = 100.0  # on a busy machine a second of CPU time is long in coming


def test_a_memory_bomb_ends_in_a_memory_error() -> None:
    result = run("blocks = [bytearray(1 << 26) for _ in range(16)]", memory_mb=256)  # 16 x 64 MiB
    assert result.status is SandboxStatus.MEMORY
    assert result.last_error_line == "MemoryError"


def test_a_gigabyte_on_stderr_costs_the_owner_no_memory() -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = run("import os\nblock = b'x' * (1 << 20)\nfor _ in range(1024): os.write(2, block)")
    assert (result.status, len(result.stderr)) == (SandboxStatus.OUTPUT, 65536)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 50_000


def test_cpu_time_is_limited() -> None:
    """The kernel holds this limit by its ticks: who runs when the clock ticks is charged the whole tick. Beside processes that
    sleep between ticks, the code is charged its second long before it has had one (0.6 s by `cpu_s`, which is exact). But it
    cannot be charged a second before a second has passed."""
    result = run("while True: pass", cpu_s=1, wall_s=_LOADED_WALL_S)
    assert result.status is SandboxStatus.CPU
    assert result.duration_s >= 0.9
    assert 0 < result.cpu_s < 3


def test_limits_cannot_be_raised_files_and_descriptors_are_bounded_and_no_memory_is_uncounted() -> None:
    code = f"""{TRIAL}
import ctypes, os, resource
for name in ("CPU", "AS", "FSIZE", "NOFILE", "CORE"):
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    try:
        resource.setrlimit(kind, (hard + 1, hard + 1))
        print(name, "went through")
    except (ValueError, OSError):
        pass
trial(lambda: open("large", "wb").write(bytes(3 << 20)))
print(os.path.getsize("large") >> 20)
trial(lambda: os.memfd_create("hidden"))
libc = ctypes.CDLL(None, use_errno=True)
print(libc.shmget(0, 1 << 20, 0o1600), libc.msgget(0, 0o1600))
trial(lambda: [os.pipe() for _ in range(2000)])
"""
    assert run(code, file_mb=2).stdout.splitlines() == ["OSError", "2", "PermissionError", "-1 -1", "OSError"]


@pytest.mark.parametrize(
    "write",
    [
        "open('a', 'wb').write(block)",
        "f = open('a', 'wb'); os.remove('a'); f.write(block)",  # it is in no directory
        "f = open('a', 'wb+'); f.truncate(1 << 20); mmap.mmap(f.fileno(), 1 << 20).write(block); os.remove('a')",
        "f = os.open('a', os.O_CREAT | os.O_RDWR); os.posix_fallocate(f, 0, 8 << 20); os.close(f); os.remove('a')",
    ],
)
def test_a_run_that_writes_too_much_in_all_is_killed(write: str) -> None:
    result = run(f"import mmap, os\nblock = bytes(1 << 20)\nwhile True: {write}", written_mb=64)
    assert result.status is SandboxStatus.WRITTEN
    assert result.duration_s < 15
