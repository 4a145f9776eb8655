"""Stores that are closed when the test ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from grpo_async.store import RolloutStore
from tests.store.builders import OpenStore


@pytest.fixture
def open_store() -> Iterator[OpenStore]:
    """Opens rollout stores; takes RolloutStore's arguments. They are not sealed at the end, which takes a process."""
    with ExitStack() as stack:

        def open_one(folder: Path, **options: Any) -> RolloutStore:
            return stack.enter_context(RolloutStore(folder, **{"seals_at_close": False, **options}))

        yield open_one
