"""The real vLLM keeps the contract of a server."""

from __future__ import annotations

import pytest

from tests.servers.contract import Contract


@pytest.mark.vllm
class TestVllm(Contract):
    """See tests/servers/contract.py."""
