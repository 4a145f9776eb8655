"""Every test begins with fresh sample environments, and every instance of a test ends with it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from tests.envs import sample_environments


@pytest.fixture(autouse=True)
def _fresh_samples() -> Iterator[None]:
    sample_environments.clear()
    yield
    sample_environments.gate.set()
    for thread in threading.enumerate():
        if thread.name.startswith("environment-"):
            thread.join(timeout=10)
            assert not thread.is_alive(), f"{thread.name} was never stopped"
