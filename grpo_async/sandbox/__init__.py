"""Runs model-written code: in one process with one wall around it, which is killed in time.

    await Sandbox(limits).run(code) -> SandboxResult
      |- does the wall stand here? tried once per process          `wall`
      |- one run, from its start to its last process's death       `execution`
      `- how the child builds the wall around itself               `inside`

The wall is Landlock (files), seccomp (everything else that reaches out of the process: sockets, signals, new processes and
threads) and resource limits; where the kernel has not all of it, the sandbox refuses to start. The code may always lie about what
it did: it chooses its exit code and its output.
"""

from __future__ import annotations

from grpo_async.sandbox.execution import SandboxError, SandboxLimits, SandboxResult, SandboxStatus
from grpo_async.sandbox.sandbox import Sandbox, startup_notes
from grpo_async.sandbox.wall import MECHANISMS, missing

__all__ = [
    "MECHANISMS",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "SandboxStatus",
    "missing",
    "startup_notes",
]
