"""The sandbox, and whether its wall stands on this machine: once per process a short program tries to get through it."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from grpo_async.errors import ConfigError
from grpo_async.sandbox.execution import Job, SandboxError, SandboxLimits, SandboxResult, execute, find_interpreter
from grpo_async.sandbox.inside import LANDLOCK, SECCOMP

MECHANISMS = (LANDLOCK, SECCOMP)

_PROGRAM = """
import json, os, socket
given = json.load(open("given.json"))
attacks = {
    "landlock": lambda: open(given["secret"]).close(),
    "seccomp": lambda: socket.create_connection(("127.0.0.1", given["port"]), 5).close(),
}
passed = []
for name, attack in attacks.items():
    try:
        attack()
    except OSError:
        continue
    passed.append(name)
print(json.dumps(passed))
"""
_LIMITS = SandboxLimits(wall_s=60.0, cpu_s=30.0, memory_mb=256)


@functools.cache
def problem() -> str | None:
    """Why the wall does not stand on this machine; None where it does. Tried at the first call, a tenth of a second."""
    if sys.platform != "linux":
        return "this is not Linux"
    try:
        passed = attack(frozenset(MECHANISMS))
    except SandboxError as error:
        if error.mechanism not in MECHANISMS:
            raise
        return f"{error.mechanism}: {error}"
    return f"{', '.join(sorted(passed))}: it was set up, and a trial run got through it" if passed else None


def attack(mechanisms: frozenset[str]) -> frozenset[str]:
    """Try to get through a wall of these parts; returns those that did not hold."""
    with (
        tempfile.TemporaryDirectory(prefix="grpo-async-trial-") as outside,
        socket.create_server(("127.0.0.1", 0)) as server,
    ):
        secret = os.path.join(outside, "secret")
        with open(secret, "w", encoding="ascii") as file:
            file.write("secret")
        given = {"port": server.getsockname()[1], "secret": secret}
        job = Job(
            code=_PROGRAM,
            files={"given.json": json.dumps(given).encode()},
            limits=_LIMITS,
            interpreter=find_interpreter(),
            mechanisms=mechanisms,
        )
        with ThreadPoolExecutor(1, "sandbox") as threads:  # this thread may already run an event loop
            result = threads.submit(asyncio.run, execute(job)).result()  # limited by the run's wall_s
    try:
        return frozenset(json.loads(result.stdout))
    except ValueError as error:
        raise SandboxError(
            f"a trial run gave no result: {result.status}, exit code {result.exit_code}. {result.stderr[-500:]}"
        ) from error


class Sandbox:
    """Runs untrusted Python code. Holds no process or file between runs; thread-safe."""

    def __init__(
        self,
        limits: SandboxLimits | None = None,
        *,
        with_site_packages: bool = False,
    ) -> None:
        self.limits = limits or SandboxLimits()
        self._interpreter = find_interpreter(with_site_packages=with_site_packages)
        startup_notes()

    async def run(
        self,
        code: str,
        *,
        stdin: str = "",
        files: Mapping[str, str | bytes] | None = None,
        pass_descriptors: Sequence[int] = (),
    ) -> SandboxResult:
        """Run code as the main program of a fresh interpreter. Cancelling it kills the code first. Anything that the code does is a
        result; SandboxError: the sandbox itself failed.

        Example: await Sandbox().run("print(int(input()) + 1)", stdin="41") -> status OK, stdout "42\\n".

        Args:
            files: content by path relative to the working directory, which is otherwise empty.
            pass_descriptors: further file descriptors that it inherits, under the same numbers.
        """
        contents = {
            _checked_path(name): content.encode("utf-8", "replace") if isinstance(content, str) else content
            for name, content in (files or {}).items()
        }
        job = Job(
            code=code,
            stdin=stdin,
            files=contents,
            limits=self.limits,
            interpreter=self._interpreter,
            mechanisms=frozenset(MECHANISMS),
            pass_descriptors=pass_descriptors,
        )
        return await execute(job)


def _checked_path(name: str) -> str:
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"the file name {name!r} is not a path below the working directory; write it as `dir/file.txt`"
        )
    return name


def startup_notes() -> list[str]:
    """No notes for the start of a run; ConfigError where the wall does not stand."""
    if (why := problem()) is not None:
        raise ConfigError(
            "the sandbox for model-written code needs Landlock and seccomp (Linux 5.13 or later on x86-64 or ARM64, in most "
            f"containers too), and this machine lacks them: {why}. Run it on a machine that has them"
        )
    return []
