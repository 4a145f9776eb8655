"""Attacks need the whole wall; where this machine lacks a part of it, they are skipped with its answer."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_async.sandbox import problem


@pytest.fixture(autouse=True, scope="session")
def wall() -> None:
    if (why := problem()) is not None:
        pytest.skip(f"this machine has no wall: {why}")


@pytest.fixture
def deep_path() -> Iterator[Path]:
    """In place of tmp_path where deep trees are made: one that is left over would break every later pytest session, which
    clears old directories by recursion."""
    path = Path(tempfile.mkdtemp(prefix="grpo-async-test-"))
    yield path
    subprocess.run(["chmod", "-R", "u+rwx", str(path)], check=True, timeout=60)
    subprocess.run(["rm", "-rf", str(path)], check=True, timeout=60)
