"""A tool that runs Python in the sandbox. In a config: `function: grpo_async.tools.python:run_python`.

The model sees only `code`. `arguments` sets the rest: wall_s, cpu_s, memory_mb, max_output_chars and
with_site_packages (whether the code may import installed packages). The tool's own `timeout_s` must be above wall_s.
"""

from __future__ import annotations

import asyncio
import functools

from grpo_async.sandbox import Sandbox, SandboxLimits, SandboxResult, SandboxStatus, startup_notes


async def _run_python(
    code: str,
    *,
    wall_s: float,
    cpu_s: float,
    memory_mb: int,
    max_output_chars: int,
    with_site_packages: bool,
) -> str:
    """Runs a Python program and returns what it printed.

    Every call starts afresh: nothing is kept from earlier calls. There is no network, there are no files, and it cannot start
    threads or other programs.

    Args:
        code: The program. Use print() to see results.

    Returns:
        What the program printed, and the error message if it failed.
    """
    limits = SandboxLimits(wall_s=wall_s, cpu_s=cpu_s, memory_mb=memory_mb, max_output_chars=max_output_chars)
    sandbox = await asyncio.to_thread(Sandbox, limits, with_site_packages=with_site_packages)
    return _describe(await sandbox.run(code), limits)


_run_python.__name__ = "run_python"
# The model does not see arguments that a partial fixes, and `arguments` of the config may still override them.
run_python = functools.partial(
    _run_python,
    wall_s=10.0,
    cpu_s=10.0,
    memory_mb=512,
    max_output_chars=8192,
    with_site_packages=False,
)
run_python.startup_notes = startup_notes  # type: ignore[attr-defined]


def _describe(result: SandboxResult, limits: SandboxLimits) -> str:
    """Output first, then what went wrong; never empty."""
    problem = {
        SandboxStatus.OK: "",
        SandboxStatus.ERROR: result.last_error_line or f"The program ended with exit code {result.exit_code}.",
        SandboxStatus.TIMEOUT: f"Stopped: the program ran longer than {limits.wall_s:g} seconds.",
        SandboxStatus.CPU: f"Stopped: the program used more than {limits.cpu_s:g} seconds of CPU time.",
        SandboxStatus.MEMORY: f"Stopped: the program used more than {limits.memory_mb} MiB of memory.",
        SandboxStatus.OUTPUT: f"Stopped: the program printed more than {limits.max_output_chars} characters.",
        SandboxStatus.WRITTEN: f"Stopped: the program wrote more than {limits.written_mb} MiB.",
        SandboxStatus.KILLED: "The program crashed.",
    }[result.status]
    parts = [part for part in (result.stdout.rstrip("\n"), problem) if part]
    return "\n".join(parts) or "The program printed nothing."
