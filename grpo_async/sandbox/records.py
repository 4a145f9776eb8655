"""What a run may take, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from grpo_async.errors import ConfigError, GrpoAsyncError


class SandboxError(GrpoAsyncError):
    """The sandbox itself failed; says nothing about the code. The message carries the system's answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxLimits:
    """Most that one run may take.

    Raises:
        ConfigError: a value that cannot be a limit.
    """

    wall_s: float = 10.0  # from the start of the code
    cpu_s: float = 10.0  # CPU seconds of each process, in whole seconds (at least 1)
    memory_mb: int = 512  # address space of each process, and what all of them hold together
    file_mb: int = 16  # size of each file
    directory_mb: int = 64  # all files of the run together
    max_processes: int = 32  # processes and threads at once, the code's first one included
    max_output_chars: int = 65536  # of stdout, and again of stderr

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not is_number or not value > 0 or value == float("inf"):
                raise ConfigError(f"sandbox limit `{field.name}` is {value!r}; it must be a number above 0")
            if not field.name.endswith("_s") and not isinstance(value, int):
                raise ConfigError(f"sandbox limit `{field.name}` is {value!r}; it must be a whole number")


class SandboxStatus(StrEnum):
    """How a run ended. What the code did is seldom certain: MEMORY is also an uncaught MemoryError."""

    OK = "ok"  # exit code 0
    ERROR = "error"  # another exit code: an uncaught exception, mostly
    TIMEOUT = "timeout"  # longer than `wall_s`; killed
    CPU = "cpu"  # more CPU time than `cpu_s`; killed
    MEMORY = "memory"  # more memory than `memory_mb`
    OUTPUT = "output"  # more output than `max_output_chars`; killed, and what came before is kept
    KILLED = "killed"  # by another signal: a crash, or a kill of its own

    @property
    def is_ok(self) -> bool:
        return self is SandboxStatus.OK


@dataclass(frozen=True, slots=True, kw_only=True)
class SandboxResult:
    """One run. The streams are decoded as UTF-8, with a mark where that is impossible, and cut at `max_output_chars`.

    Example: `print(1); 1 / 0` -> status ERROR, stdout "1\\n", stderr a traceback, exit_code 1.
    """

    status: SandboxStatus
    stdout: str
    stderr: str
    exit_code: int | None  # negative: the signal that ended it; None: the owner ended it
    duration_s: float  # wall-clock, from the start of the code
    cpu_s: float = 0.0  # of the code and of its children that have ended; 0.0 when the owner ended it

    @property
    def last_error_line(self) -> str:
        """The last line of stderr that is not empty, "" without one: of a traceback the one that says what it was."""
        lines = [line for line in self.stderr.splitlines() if line.strip()]
        return lines[-1].strip() if lines else ""
