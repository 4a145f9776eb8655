"""Benchmarks run in processes of their own: they set threads, processors and environment variables as they like."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run_apart(name: str, arguments: Sequence[str]) -> int:
    """The exit code of `python -m benchmarks NAME ARGUMENTS`; what it prints goes to the test's output."""
    command = [sys.executable, "-m", "benchmarks", name, *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    print(done.stdout, done.stderr)
    return done.returncode
