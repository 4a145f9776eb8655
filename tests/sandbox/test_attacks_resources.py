"""Code that takes too much. Every bomb is bounded, so that a restriction that fails costs the test and not the machine."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable

import pytest

from grpo_async.sandbox import SandboxStatus
from tests.sandbox.support import TRIAL, Run

_LOADED_WALL_S = 100.0  # on a busy machine a second of CPU time is long in coming


@pytest.fixture(autouse=True)
def limits(needs: Callable[..., None], request: pytest.FixtureRequest) -> None:
    if "restrictions" in request.fixturenames:
        needs(request.getfixturevalue("restrictions"), "limits")
    else:
        needs(request.getfixturevalue("strongest"), "limits", "totals")


def test_a_memory_bomb_ends_in_a_memory_error(run: Run) -> None:
    result = run("blocks = [bytearray(1 << 26) for _ in range(16)]", memory_mb=256)  # 16 x 64 MiB
    assert result.status is SandboxStatus.MEMORY
    assert result.last_error_line == "MemoryError"


def test_processes_that_each_stay_below_the_limit_are_stopped_together(run_strongest: Run) -> None:
    code = """
import os, time
for _ in range(5):
    if os.fork() == 0:
        block = bytearray(os.urandom(1 << 20)) * 100
        time.sleep(20)
        os._exit(0)
time.sleep(20)
"""
    result = run_strongest(code, memory_mb=256)  # 5 x 100 MiB
    assert result.status is SandboxStatus.MEMORY
    assert result.duration_s < 15


def test_memory_that_is_shared_after_a_fork_counts_once(run_strongest: Run) -> None:
    code = """
import os, time
block = bytearray(os.urandom(1 << 20)) * 100
children = []
for _ in range(5):
    child = os.fork()
    if child == 0:
        time.sleep(0.3)
        os._exit(0)
    children.append(child)
for child in children:
    os.waitpid(child, 0)
"""
    assert run_strongest(code, memory_mb=256).status is SandboxStatus.OK


def test_endless_output_is_cut_and_ends_the_run(run: Run) -> None:
    started = time.monotonic()
    result = run("while True: print('x' * 1000)", max_output_chars=5000)
    assert result.status is SandboxStatus.OUTPUT
    assert len(result.stdout) == 5000
    assert time.monotonic() - started < 15


def test_a_gigabyte_on_stderr_costs_the_owner_no_memory(run: Run) -> None:
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    result = run("import os\nblock = b'x' * (1 << 20)\nfor _ in range(1024): os.write(2, block)")
    assert (result.status, len(result.stderr)) == (SandboxStatus.OUTPUT, 65536)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 50_000


def test_output_of_exactly_the_limit_is_all_right(run: Run) -> None:
    result = run("import sys; sys.stdout.write('x' * 100)", max_output_chars=100)
    assert (result.status, len(result.stdout)) == (SandboxStatus.OK, 100)


def test_cpu_time_is_limited(run: Run) -> None:
    """The kernel holds this limit by its ticks: who runs when the clock ticks is charged the whole tick. Beside processes that
    sleep between ticks, the code is charged its second long before it has had one (0.6 s by `cpu_s`, which is exact). But it
    cannot be charged a second before a second has passed."""
    result = run("while True: pass", cpu_s=1, wall_s=_LOADED_WALL_S)
    assert result.status is SandboxStatus.CPU
    assert result.duration_s >= 0.9
    assert 0 < result.cpu_s < 3


def test_a_handler_of_the_cpu_signal_gains_a_second(run_strongest: Run) -> None:
    code = "import signal\nsignal.signal(signal.SIGXCPU, lambda *_: None)\nwhile True: pass"
    result = run_strongest(code, cpu_s=1, wall_s=_LOADED_WALL_S)
    assert (result.status, result.exit_code) == (SandboxStatus.CPU, -9)


def test_limits_cannot_be_raised_files_and_descriptors_are_bounded_and_no_memory_is_uncounted(run: Run) -> None:
    code = f"""{TRIAL}
import ctypes, os, resource
for name in ("CPU", "AS", "FSIZE", "NPROC", "NOFILE", "CORE"):
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


def test_the_directory_has_a_largest_size_and_number_of_files(run_strongest: Run) -> None:
    code = f"""{TRIAL}
import os
def fill():
    for n in range(20):
        with open(f"{{n}}", "wb", buffering=0) as file:
            if file.write(bytes(1 << 20)) != 1 << 20:
                raise OSError("full")
trial(fill)
print(sum(os.path.getsize(name) for name in os.listdir()) <= 8 << 20)
for name in os.listdir():
    os.remove(name)
trial(lambda: [open(str(n), 'w').close() for n in range(5000)])
"""
    assert run_strongest(code, directory_mb=8).stdout == "OSError\nTrue\nOSError\n"
