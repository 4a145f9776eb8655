"""The embedded engine keeps the contract of a server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.contract import MAX_MODEL_LEN, NUM_SLOTS, Contract, model_a, model_b, pusher, version
from tests.servers.embedded_support import Served, live, load

__all__ = ["model_a", "model_b", "pusher", "version"]  # fixtures


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Iterator[Served]:
    with live(load(tiny_model), num_slots=NUM_SLOTS, max_model_len=MAX_MODEL_LEN, model_path=str(tiny_model)) as served:
        yield served


class TestEmbedded(Contract):
    """See tests/servers/contract.py."""
