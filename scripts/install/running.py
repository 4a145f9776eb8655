"""Runs one step of the installation: quiet while it goes well, the cause and the cure when it does not."""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.install.pip_settings import without_passwords
from scripts.install.plan import InstallError

_TICK_S = 20.0
_END_TIMEOUT_S = 30.0  # pip and uv remove what they have half written


def say(line: str) -> None:
    print(f"bootstrap: {line}", flush=True)


def run_step(label: str, command: Sequence[str], environment: Mapping[str, str], *, log: Path) -> None:
    """Run `command` with its output in `log`; a line every 20 s shows that it lives. Raises InstallError if it fails."""
    say(label)
    with log.open("a", encoding="utf-8") as output:
        output.write(without_passwords(f"\n$ {shlex.join(command)}\n"))
        output.flush()
        begin = log.stat().st_size
        process = subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            code = _wait(process)
        finally:
            if process.poll() is None:  # interrupted
                _end(process)
    if code != 0:
        printed = without_passwords(log.read_bytes()[begin:].decode(errors="replace")).strip()
        raise InstallError(f"'{label}' failed:\n{printed[-3000:]}\n{how_to_mend(printed)}\nThe whole log: {log}")


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(timeout=_END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(timeout=_END_TIMEOUT_S)


def _wait(process: subprocess.Popen[bytes]) -> int:
    started = time.monotonic()
    while True:
        try:
            return process.wait(timeout=_TICK_S)
        except subprocess.TimeoutExpired:
            say(f"  ... {time.monotonic() - started:.0f} s")


def how_to_mend(output: str) -> str:
    """What to do about a failed step, from what pip or uv printed."""

    def says(pattern: str) -> bool:
        return re.search(pattern, output, re.IGNORECASE) is not None

    if says("no space left|disk quota"):
        return "The disk is full: free some room (uv's download cache: `.venv/bin/uv cache clean`) and run this again."
    if says("certificate"):
        return "A certificate is not trusted: behind a company's proxy set PIP_CERT=/path/to/its/ca.pem, then run this again."
    if says(
        "dns error|error sending request|connect|timed? ?out|unreachable|name resolution|network|failed to fetch|versions: none"
    ):
        return "The package index cannot be reached: check connection and HTTPS_PROXY, or name a mirror: PIP_INDEX_URL."
    if says("no solution found|no matching distribution|unsatisfiable"):
        return (
            "No set of versions fits, most likely because the index lacks one that requirements/constraints.txt pins: "
            "use a complete index (PIP_INDEX_URL), or loosen that pin."
        )
    return "Run this again; if it fails the same way, remove .venv first (rm -rf .venv)."
