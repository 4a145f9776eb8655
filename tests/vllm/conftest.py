"""One real vLLM server for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.servers.contract import MAX_MODEL_LEN, NUM_SLOTS, model_a, model_b, pusher, version
from tests.vllm.server import VllmServer, experiment, running_server

__all__ = ["model_a", "model_b", "pusher", "version"]  # fixtures


@pytest.fixture(scope="session")
def vllm_server(needs_vllm: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Shared: see tests/servers/contract.py."""
    config = experiment(str(tiny_model), extra_args=["--max-num-seqs", str(NUM_SLOTS)])
    assert config["inference"]["max_model_len"] == MAX_MODEL_LEN
    with running_server(config, tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="session")
def server(vllm_server: VllmServer) -> VllmServer:
    """For the tests of the contract and the fixtures that come with it."""
    return vllm_server
