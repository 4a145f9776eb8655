"""Reward functions that go wrong in every way, and some that show where they run."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

a_number = 3


_loops: list[asyncio.AbstractEventLoop] = []


async def its_loop(completions: list[str]) -> list[float]:
    """The number of its loop, from 0."""
    loop = asyncio.get_running_loop()
    if loop not in _loops:
        _loops.append(loop)
    return [float(_loops.index(loop))] * len(completions)


class NotAnInstance:
    def __call__(self, completions: list[str]) -> list[float]:
        return [0.0] * len(completions)


def positional_only(completions: list[str], /) -> list[float]:
    return [0.0] * len(completions)


def takes_nothing() -> list[float]:
    return []


def raises(completions: list[str]) -> list[float]:
    raise KeyError("no such thing")


class PickyError(Exception):
    def __init__(self, one: str, two: str) -> None:  # pickles, but does not unpickle
        super().__init__(f"{one} and {two}")


def raises_picky(completions: list[str]) -> list[float]:
    raise PickyError("this", "that")


def sleeps_if_asked(completions: list[str]) -> list[float]:
    if completions[0] == "sleep":
        time.sleep(60.0)
    return [1.0] * len(completions)


def prints_its_pid_and_sleeps(completions: list[str]) -> list[float]:
    print(os.getpid(), flush=True)
    time.sleep(60.0)
    return [0.0] * len(completions)


def prints_17_mb(completions: list[str]) -> list[float]:
    for _ in range(17):
        print("x" * 2**20)
    return [0.0] * len(completions)


def dies_if_asked(completions: list[str]) -> list[float]:
    if completions[0].startswith("exit"):
        os._exit(3)
    if completions[0] == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    return [1.0] * len(completions)


def starts_a_child(completions: list[str]) -> list[float]:
    """Writes the pid of a child to the file that the completion names, and never returns."""
    child = subprocess.Popen(["sleep", "60"])
    Path(completions[0]).write_text(str(child.pid))
    child.wait()
    return [0.0] * len(completions)


def burns(completions: list[str], seconds: float) -> list[float]:
    """Holds the GIL: one long C call."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        sum(range(4_000_000))
    return [1.0] * len(completions)


def logs_something_odd(completions: list[str], log_extra: Any) -> list[float]:
    log_extra("odd", [lambda: None for _ in completions])
    return [1.0] * len(completions)


def logs(completions: list[str], log_extra: Any, log_metric: Any, trainer_state: Any) -> list[float]:
    log_extra("upper", [completion.upper() for completion in completions])
    log_metric("share", 1.0)
    log_metric("share", 0.5)
    log_metric("broken", float("nan"))
    return [float(trainer_state.global_step)] * len(completions)


def uses_up(completions: list[Any], prompts: list[Any], completion_ids: list[Any], tests: list[Any]) -> list[float]:
    """Counts what it got, and leaves nothing of it."""
    scores = []
    for parts in zip(completions, prompts, completion_ids, tests, strict=True):
        scores.append(float(sum(len(part) for part in (*parts, parts[-1]["in"]))))
        parts[-1]["in"].clear()
        for message in (*parts[0], *parts[1]):
            message.clear()
        for part in parts:
            part.clear()
    return scores
