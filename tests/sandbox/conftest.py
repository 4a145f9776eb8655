"""Every attack runs under two sets of restrictions: the strongest that this machine has, and those of a container that refuses
namespaces. A test whose subject they cannot enforce is skipped by name; with namespaces nothing may be skipped."""

from __future__ import annotations

import asyncio
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from grpo_async.sandbox import Sandbox, SandboxLimits, SandboxResult, capabilities
from grpo_async.sandbox.restrictions import ProbeResult, probe_restrictions
from tests.sandbox.support import Run

_WITHOUT = {"strongest": frozenset[str](), "without namespaces": frozenset({"namespaces"})}


@pytest.fixture(scope="session")
def probe_result_of() -> Callable[[frozenset[str]], ProbeResult]:
    """What is found on this machine without some mechanisms, each tried once."""
    known: dict[frozenset[str], ProbeResult] = {}

    def find(without: frozenset[str]) -> ProbeResult:
        if without not in known:
            known[without] = probe_restrictions(without=without)
        return known[without]

    return find


@pytest.fixture(params=_WITHOUT)
def restrictions(
    request: pytest.FixtureRequest,
    probe_result_of: Callable[[frozenset[str]], ProbeResult],
    monkeypatch: pytest.MonkeyPatch,
) -> ProbeResult:
    found = probe_result_of(_WITHOUT[request.param])
    monkeypatch.setattr("grpo_async.sandbox.restrictions._probed", found)
    return found


@pytest.fixture
def strongest(probe_result_of: Callable[[frozenset[str]], ProbeResult], monkeypatch: pytest.MonkeyPatch) -> ProbeResult:
    """For what nothing but namespaces can enforce."""
    found = probe_result_of(frozenset())
    monkeypatch.setattr("grpo_async.sandbox.restrictions._probed", found)
    return found


@pytest.fixture
def needs() -> Callable[..., None]:
    """Skip where the restrictions of the test do not hold these capabilities."""

    def needs(found: ProbeResult, *names: str) -> None:
        for capability in capabilities():
            if capability.name in names and not capability.is_available:
                assert "namespaces" not in found.mechanisms, f"with namespaces {capability.name} must be enforced"
                pytest.skip(f"this machine cannot enforce {capability.name}: {capability.how}")

    return needs


@pytest.fixture
def deep_path() -> Iterator[Path]:
    """In place of tmp_path where deep trees are made: one that is left over would break every later pytest session, which
    clears old directories by recursion."""
    path = Path(tempfile.mkdtemp(prefix="grpo-async-test-"))
    yield path
    subprocess.run(["chmod", "-R", "u+rwx", str(path)], check=True, timeout=60)
    subprocess.run(["rm", "-rf", str(path)], check=True, timeout=60)


@pytest.fixture
def run(restrictions: ProbeResult) -> Run:
    return run_code


@pytest.fixture
def run_strongest(strongest: ProbeResult) -> Run:
    return run_code


def run_code(
    code: str, *, stdin: str = "", files: dict[str, str | bytes] | None = None, **limits: float
) -> SandboxResult:
    values: dict[str, float] = {"wall_s": 20.0, "cpu_s": 10.0, **limits}
    sandbox = Sandbox(SandboxLimits(**values), require=[])  # type: ignore[arg-type]
    return asyncio.run(sandbox.run(code, stdin=stdin, files=files))
