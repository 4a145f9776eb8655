"""The quickstart's model and data, made once: the same folder that the shipped configs name."""

from __future__ import annotations

import pytest

from tests.e2e.support import REPOSITORY


@pytest.fixture(scope="session", autouse=True)
def quickstart_files() -> None:
    from grpo_async.quickstart.prepare import prepare

    prepare(REPOSITORY / ".cache" / "quickstart" / "seed_0", seed=0)
