"""The sandbox, and whether its wall stands on this machine: once per process a short program tries to get through it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from grpo_async.errors import ConfigError
from grpo_async.sandbox.execution import Job, SandboxError, SandboxLimits, SandboxResult, execute, find_interpreter
from grpo_async.sandbox.inside import LANDLOCK, SECCOMP

MECHANISMS = (LANDLOCK, SECCOMP)
CONSEQUENCES = {
    LANDLOCK: "model-written code can read and change whatever this user can (keys, the repository, results)",
    SECCOMP: "model-written code can reach the network and every server on this machine, start processes without number, and "
    "end this user's other processes, the trainer included",
}

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

_lock = threading.Lock()
_missing: Mapping[str, str] | None = None


def missing() -> Mapping[str, str]:
    """The parts of the wall that do not stand here, each with the system's answer; empty where all do. Tried at the first call (a
    tenth of a second), then cached.
    """
    global _missing
    with _lock:
        if _missing is None:
            _missing = _try()
        return _missing


def _try() -> Mapping[str, str]:
    if sys.platform != "linux":
        return dict.fromkeys(MECHANISMS, "this is not Linux")
    refused: dict[str, str] = {}
    while True:  # each round adds a mechanism, or is the last one
        mechanisms = frozenset(MECHANISMS) - refused.keys()
        try:
            passed = attack(mechanisms) & mechanisms
        except SandboxError as error:
            if error.mechanism is None or error.mechanism not in mechanisms:
                raise
            refused[error.mechanism] = str(error)
        else:
            return refused | dict.fromkeys(passed, "it was set up, and a trial run got through it")


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
        require: Iterable[str] = MECHANISMS,
        with_site_packages: bool = False,
    ) -> None:
        self.limits = limits or SandboxLimits()
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
        """Run code as the main program of a fresh interpreter. Cancelling it kills the code first.

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
        job = Job(
            code=code,
            stdin=stdin,
            files=contents,
            limits=self.limits,
            interpreter=self._interpreter,
            mechanisms=frozenset(MECHANISMS) - missing().keys(),
            pass_descriptors=pass_descriptors,
        )
        return await execute(job)


def _check(require: Iterable[str]) -> None:
    wanted = list(require)
    if unknown := [name for name in wanted if name not in MECHANISMS]:
        raise ConfigError(f"sandbox: `require` names {unknown}, which do not exist; there are {list(MECHANISMS)}")
    lacking = {name: why for name, why in missing().items() if name in wanted}
    if lacking:
        lines = [f"  {name}: {why}. Without it {CONSEQUENCES[name]}" for name, why in lacking.items()]
        raise ConfigError(
            "the sandbox for model-written code needs Landlock and seccomp (Linux 5.13 or later on x86-64 or ARM64, in most "
            "containers too), and this machine lacks\n" + "\n".join(lines) + "\n"
            f"Run it on a machine that has them, or at your own risk with `require: {[n for n in wanted if n not in lacking]}`."
        )


def _checked_path(name: str) -> str:
    parts = name.split("/")
    if not name or "\0" in name or any(part in ("", ".", "..") for part in parts):
        raise ValueError(
            f"the file name {name!r} is not a path below the working directory; write it as `dir/file.txt`"
        )
    return name


def startup_notes(require: Iterable[str] = MECHANISMS) -> list[str]:
    """Lines for the start of a run: which part of the wall is missing on this machine, and the consequences.

    Raises:
        ConfigError: a required part is missing on this machine, or there is none of this name.
    """
    _check(require)
    return [f"the sandbox has no {name} here ({why}): {CONSEQUENCES[name]}" for name, why in missing().items()]
