"""A run to look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.store.builders import OpenStore
from tests.viewer.terminal.support import fill


@pytest.fixture
def run(tmp_path: Path, open_store: OpenStore) -> Path:
    """The folder of a run as `support.fill` makes it; its store is still open, as while it trains."""
    fill(open_store(tmp_path / "rollouts"))
    return tmp_path
