"""What the tests of the sandbox share."""

from __future__ import annotations

from typing import Protocol

import psutil

from grpo_async.sandbox import SandboxResult


class Run(Protocol):
    """Run code behind the walls of the test."""

    def __call__(
        self, code: str, *, stdin: str = ..., files: dict[str, str | bytes] | None = ..., **limits: float
    ) -> SandboxResult: ...


# Puts `trial(action)` before an attack: prints what it raised, or that it went through.
TRIAL = """
def trial(action):
    try:
        action()
    except (OSError, MemoryError, RuntimeError) as error:
        print(type(error).__name__)
    else:
        print("went through")
"""


def descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def marked(mark: str) -> list[psutil.Process]:
    """Processes of the whole machine with `mark` on their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(mark in word for word in process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found
