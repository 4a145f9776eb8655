"""Finds out whether the wall stands on this machine: once per process a short program tries to get through it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

from grpo_async.sandbox.execution import Job, SandboxError, SandboxLimits, execute, find_interpreter
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

    Raises:
        SandboxError: not even a plain process with limits can be run.
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
    """Try to get through a wall of these parts; returns those that did not hold.

    Raises:
        SandboxError: the wall cannot be built, or nothing can be run at all.
    """
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
