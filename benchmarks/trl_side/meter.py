"""CPU seconds of process trees between two steps of a run, seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuUse:
    """CPU seconds (user and system) of all processes of each tree between two steps."""

    trainer_s: float
    server_s: float


def tree_cpu_s(pid: int) -> float:
    """CPU seconds so far of a process and all that come from it and still run."""
    total = 0.0
    try:
        root = psutil.Process(pid)
        for process in [root, *root.children(recursive=True)]:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            total += times.user + times.system
    except psutil.NoSuchProcess:
        pass
    return total


def run_metered(
    command: Sequence[str],
    *,
    steps_file: Path,
    first: int,
    last: int,
    server_pid: int,
    log: Path,
    cwd: Path,
    environment: dict[str, str],
    timeout_s: float,
) -> CpuUse:
    """Run a command to its end, and measure from the moment that `steps_file` has `first` lines to that when it has `last`.

    Raises:
        RuntimeError: the command failed, took longer than `timeout_s`, or made fewer steps.
    """
    ends_at = time.monotonic() + timeout_s
    with log.open("wb") as output:
        process = subprocess.Popen(
            list(command), cwd=cwd, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:

        def both() -> tuple[float, float]:
            return tree_cpu_s(process.pid), tree_cpu_s(server_pid)

        begin = _when(lambda: num_lines(steps_file) >= first, both, process, ends_at)
        end = _when(lambda: num_lines(steps_file) >= last, both, process, ends_at)
        try:
            code = process.wait(timeout=max(0.1, ends_at - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"it did not end within {timeout_s:.0f} s") from None
        if code:
            raise RuntimeError(f"it ended with {code}")
    except RuntimeError as error:
        raise RuntimeError(f"{' '.join(command)}: {error}; the end of its log:\n{_tail(log)}") from error
    finally:
        stop(process)
    return CpuUse(trainer_s=end[0] - begin[0], server_s=end[1] - begin[1])


def _when(
    reached: Callable[[], bool],
    read: Callable[[], tuple[float, float]],
    process: subprocess.Popen[bytes],
    ends_at: float,
) -> tuple[float, float]:
    while not reached():
        if process.poll() is not None and not reached():
            raise RuntimeError(f"it ended with {process.returncode} before its steps were made")
        if time.monotonic() > ends_at:
            raise RuntimeError("its steps took too long")
        time.sleep(POLL_S)
    return read()


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a process that was started in a session of its own, and all of that session."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=30.0)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait(timeout=30.0)


def num_lines(path: Path) -> int:
    """Whole lines of a file; 0 where there is none."""
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _tail(log: Path, num_bytes: int = 4000) -> str:
    return log.read_bytes()[-num_bytes:].decode(errors="replace")
