"""The sandbox's interface."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from grpo_async.errors import ConfigError
from grpo_async.sandbox.execution import Job, SandboxLimits, SandboxResult, execute, find_interpreter
from grpo_async.sandbox.inside import NAMESPACES
from grpo_async.sandbox.restrictions import (
    LIMITS,
    NAMES,
    NETWORK,
    PROCESSES,
    capabilities,
    probe_result,
)

REQUIRED = (LIMITS, NETWORK, PROCESSES)
"""Without these, one completion can end the run or leave the machine, so the sandbox refuses to start without them unless told
otherwise. Missing `filesystem`, `signals` and `totals` are only reported at the start: the place where the run is started can
provide the same protection (a container, a separate user), and malicious code is rare in training."""


class Sandbox:
    """Runs untrusted Python code. Holds no process or file between runs; thread-safe.

    Args:
        limits: limits of each run.
        require: names of required capabilities; see `restrictions`.
        with_site_packages: whether the code can import the packages of this environment (numpy, ...).
        read_paths: further files and folders that the code may read.

    Raises:
        ConfigError: a required capability is not available on this machine, or its name is unknown.
    """

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        require: Iterable[str] = REQUIRED,
        with_site_packages: bool = False,
        read_paths: Sequence[str] = (),
    ) -> None:
        self.limits = limits or SandboxLimits()
        self._read_paths = read_paths
        self._interpreter = find_interpreter(with_site_packages=with_site_packages)
        _check(require)

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        pass_descriptors: Sequence[int] = (),
    ) -> SandboxResult:
        """Run code as the main program of a fresh interpreter. Cancelling it kills the code and all its processes first.

        Example: await Sandbox().run("print(int(input()) + 1)", stdin="41") -> status OK, stdout "42\\n".

        Args:
            code: Python source.
            stdin: its whole standard input.
            files: content by path relative to the working directory, which is otherwise empty.
            pass_descriptors: further file descriptors that it inherits, under the same numbers.

        Raises:
            SandboxError: the sandbox failed; anything that the code does is a result.
        """
        contents = {
            _checked_path(name): content.encode("utf-8", "replace") if isinstance(content, str) else content
            for name, content in (files or {}).items()
        }
        return await self._execute(code=code, stdin=stdin, files=contents, pass_descriptors=pass_descriptors)

    async def run_command(
        self, command: Sequence[str], *, environment: Mapping[str, str], stdin: str, loopback: int, stderr_end: int
    ) -> SandboxResult:
        """Like `run`, for a program and its arguments, whose paths contain no links.

        Args:
            environment: variables added to the sandbox's own.
            loopback: descriptor of a Unix socket. The program may then use sockets, and reaches only one address, the port of
                `inside.loopback`, whose listening socket is sent through this one. Needs namespaces (`has_loopback`).
            stderr_end: number of characters kept from the end of its stderr.
        """
        return await self._execute(
            command=command, environment=environment, stdin=stdin, loopback=loopback, stderr_end=stderr_end
        )

    async def _execute(self, **options: Any) -> SandboxResult:
        job = Job(
            limits=self.limits,
            interpreter=self._interpreter,
            mechanisms=probe_result().mechanisms,
            read_paths=self._read_paths,
            **options,
        )
        return (await execute(job))[0]


def has_loopback() -> bool:
    """Whether code in the sandbox can have its own network on this machine, in which it reaches only its owner.
    Without namespaces it has no sockets at all."""
    return NAMESPACES in probe_result().mechanisms


def _check(require: Iterable[str]) -> None:
    wanted = list(require)
    unknown = [name for name in wanted if name not in NAMES]
    if unknown:
        raise ConfigError(f"sandbox: `require` names {unknown}, which do not exist; there are {list(NAMES)}")
    missing = [c for c in capabilities() if c.name in wanted and not c.is_available]
    if missing:
        lines = [f"  {c.name}: {c.consequence} (tried: {c.how})" for c in missing]
        rest = [name for name in wanted if name not in {c.name for c in missing}]
        raise ConfigError(
            "the sandbox for model-written code cannot enforce this here:\n" + "\n".join(lines) + "\n"
            "Allow unprivileged user namespaces (sysctl kernel.apparmor_restrict_unprivileged_userns=0, or "
            "user.max_user_namespaces > 0), or run on Linux 5.13 or later with Landlock and seccomp, in a container too; "
            f"or do without them at your own risk: `require: {rest}`"
        )


def _checked_path(name: str) -> str:
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"the file name {name!r} is not a path below the working directory; write it as `dir/file.txt`"
        )
    return name


def startup_notes(require: Iterable[str] = REQUIRED) -> list[str]:
    """Lines for the start of a run: what is enforced on this machine, what is not, and the consequences.

    Raises:
        ConfigError: a required capability is not available on this machine, or its name is unknown.
    """
    _check(require)
    found = capabilities()
    notes = [f"sandbox enforces: {', '.join(f'{c.name} ({c.how})' for c in found if c.is_available) or 'nothing'}"]
    for c in found:
        if not c.is_available:
            notes.append(f"sandbox does NOT enforce {c.name}: {c.consequence} (tried: {c.how})")
    return notes
