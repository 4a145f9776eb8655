"""Stores that are closed when the test ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from grpo_async.store import RolloutStore
from tests.store.builders import OpenStore
from tests.support.stored import LineStore


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    """Opens rollout stores; takes RolloutStore's arguments. Their blocks stay JSON lines."""
    with ExitStack() as stack:

        def open_one(folder: Path, **options: Any) -> RolloutStore:
            return stack.enter_context(LineStore(folder, **options))

        yield open_one
