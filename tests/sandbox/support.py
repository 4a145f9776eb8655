"""What the tests of the sandbox share."""

from __future__ import annotations

from collections.abc import Callable, Collection

import psutil

from grpo_async.sandbox import SandboxResult

Run = Callable[..., SandboxResult]
"""`conftest.run_code`, under the restrictions of the test."""

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


def descendants(before: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """All processes below this one that were not there `before`: other tests keep servers here."""
    return [process for process in psutil.Process().children(recursive=True) if process not in before]


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
