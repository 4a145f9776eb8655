"""Stores that are closed when the test ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo_async.store import RolloutStore
from tests.store.builders import OpenStore


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    """Opens rollout stores; takes RolloutStore's arguments."""
    with ExitStack() as stack:

        def open_one(folder: Path, **options: int) -> RolloutStore:
            return stack.enter_context(RolloutStore(folder, **options))

        yield open_one
