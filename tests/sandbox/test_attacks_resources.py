"""Code that takes too much. Every bomb is bounded, so that a restriction that fails costs the test and not the machine."""

from __future__ import annotations

import resource
import time

import pytest

from grpo_async.sandbox import SandboxStatus
from tests.sandbox.support import TRIAL, run

_LOADED_WALL_S = 100.0  # on a busy machine a second of CPU time is long in coming


def test_a_memory_bomb_ends_in_a_memory_error() -> None:
    result = run("blocks = [bytearray(1 << 26) for _ in range(16)]", memory_mb=256)  # 16 x 64 MiB
    assert result.status is SandboxStatus.MEMORY
    assert result.last_error_line == "MemoryError"


def test_endless_output_is_cut_and_ends_the_run() -> None:
    started = time.monotonic()
    result = run("while True: print('x' * 1000)", max_output_chars=5000)
    assert result.status is SandboxStatus.OUTPUT
    assert len(result.stdout) == 5000
    assert time.monotonic() - started < 15


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


def test_a_handler_of_the_cpu_signal_gains_a_second() -> None:
    code = "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass"
    result = run(code, cpu_s=1, wall_s=_LOADED_WALL_S)
    assert (result.status, result.exit_code) == (SandboxStatus.CPU, -9)


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
