"""Runs model-written code: in a separate process, under limits, without network, in an empty directory, and kills its whole tree.

    await Sandbox(limits).run(code) -> SandboxResult
      |- restrictions that work here, tried once per process  `restrictions`
      |- one run, from start to the last process's death      `execution`
      `- how the child restricts itself before the code       `inside`

Invariants: a run returns shortly after `wall_s` at the latest, with no process left running and no file left on disk; the code sees
neither the environment nor the files of this process; restrictions that the system cannot enforce are in `startup_notes`, never
silently dropped, and the sandbox refuses to start if they are required. Two things are left to the caller: how many runs there are
at once, and how far to trust the result. The code may always lie about what it did: it chooses its exit code and output.
"""

from __future__ import annotations

from grpo_async.sandbox.execution import SandboxError, SandboxLimits, SandboxResult, SandboxStatus
from grpo_async.sandbox.restrictions import FILESYSTEM, Capability, capabilities
from grpo_async.sandbox.sandbox import REQUIRED, Sandbox, has_loopback, startup_notes

__all__ = [
    "FILESYSTEM",
    "REQUIRED",
    "Capability",
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "SandboxStatus",
    "capabilities",
    "has_loopback",
    "startup_notes",
]
