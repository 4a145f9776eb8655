"""Reward functions that go wrong in every way, and some that show where they run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

_loops: list[asyncio.AbstractEventLoop] = []


async def its_loop(completions: list[str]) -> list[float]:
    """The number of its loop, from 0."""
    loop = asyncio.get_running_loop()
    if loop not in _loops:
        _loops.append(loop)
    return [float(_loops.index(loop))] * len(completions)


def sleeps_if_asked(completions: list[str]) -> list[float]:
    if completions[0] == "sleep":
        time.sleep(60.0)
    return [1.0] * len(completions)


def prints_its_pid_and_sleeps(completions: list[str]) -> list[float]:
    print(os.getpid(), flush=True)
    time.sleep(60.0)
    return [0.0] * len(completions)


def dies_if_asked(completions: list[str]) -> list[float]:
    if completions[0] == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    return [1.0] * len(completions)


def starts_a_child(completions: list[str]) -> list[float]:
    """Writes the pid of a child to the file that the completion names, and never returns."""
    child = subprocess.Popen(["sleep", "60"])
    Path(completions[0]).write_text(str(child.pid))
    child.wait()
    return [0.0] * len(completions)


def logs(completions: list[str], log_extra: Any, log_metric: Any, trainer_state: Any) -> list[float]:
    log_extra("upper", [completion.upper() for completion in completions])
    log_metric("share", 1.0)
    log_metric("share", 0.5)
    log_metric("broken", float("nan"))
    return [float(trainer_state.global_step)] * len(completions)
