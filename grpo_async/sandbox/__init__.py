"""Runs model-written code: in its own process, under limits, without network, in an empty directory, killed as a tree.

    await Sandbox(limits).run(code) -> SandboxResult
      |- what can be restricted here, tried once per process  `restrictions`
      |- one run, from start to the last process' death       `execution`
      `- what the child does to itself before the code        `inside`

Invariants: a run returns in `wall_s` and a little, with nothing of it left running and nothing left on disk; the code sees
neither the environment nor the files of this process; what the system cannot enforce is in `startup_notes`, never dropped in
silence, and refused if it is required. Two things are left to others: how many runs there are at once, and what the
result is worth. The code may always lie about its own doings: exit code and output are what it says.
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
