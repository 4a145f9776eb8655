"""Runs model-written code: in one process behind one wall, which is Landlock (files), seccomp (everything else that
reaches out of the process) and resource limits. Where the kernel has not all of it, the sandbox refuses to start.
The code may always lie about what it did: it chooses its exit code and its output."""

from __future__ import annotations

from grpo_async.sandbox.execution import SandboxError, SandboxLimits, SandboxResult, SandboxStatus
from grpo_async.sandbox.sandbox import Sandbox, problem, startup_notes

__all__ = [
    "Sandbox",
    "SandboxError",
    "SandboxLimits",
    "SandboxResult",
    "SandboxStatus",
    "problem",
    "startup_notes",
]
