"""What the tests of the sandbox share."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping

import psutil

from grpo_async.sandbox import Sandbox, SandboxLimits, SandboxResult

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


def run(
    code: str, *, stdin: str = "", files: Mapping[str, str | bytes] | None = None, **limits: float
) -> SandboxResult:
    values: dict[str, float] = {"wall_s": 20.0, "cpu_s": 10.0, **limits}
    sandbox = Sandbox(SandboxLimits(**values))  # type: ignore[arg-type]
    return asyncio.run(sandbox.run(code, stdin=stdin, files=files))


def descendants(before: Collection[psutil.Process] = ()) -> list[psutil.Process]:
    """All processes below this one that were not there `before`: other tests keep servers here."""
    return [process for process in psutil.Process().children(recursive=True) if process not in before]
