"""One real vLLM server for the whole folder, and Hugging Face models to compare it with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.weight_push import WeightPusher, push_state_dict
from tests.vllm.reference import Reference
from tests.vllm.server import MAX_NUM_SEQS, VllmServer, experiment, running_server


@pytest.fixture(scope="session")
def vllm_server(needs_vllm: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Shared: a test brings the weights it needs by pushing them, and leaves the server running and not paused."""
    few_at_once = ["--max-num-seqs", str(MAX_NUM_SEQS)]  # so that a test can make vLLM queue requests
    config = experiment(str(tiny_model), extra_args=few_at_once)
    with running_server(config, tmp_path_factory.mktemp("vllm")) as server:
        yield server


@pytest.fixture(scope="session")
def model_a(tiny_model: Path) -> Reference:
    """The model that servers load at start."""
    return Reference(tiny_model)


@pytest.fixture(scope="session")
def model_b(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """The same shape, other weights."""
    from tests.support.tiny_model import build_tiny_model

    return Reference(build_tiny_model(tmp_path_factory.mktemp("model_b"), seed=1))


@pytest.fixture
def version(vllm_server: VllmServer, model_a: Reference) -> int:
    """Model A is served, under the version that is returned."""
    version = vllm_server.info().policy_version + 1
    push_state_dict(vllm_server.url, vllm_server.token, model_a.parameters(), version)
    return version


@pytest.fixture
def pusher(vllm_server: VllmServer) -> Iterator[WeightPusher]:
    with WeightPusher(vllm_server.url, vllm_server.token, timeout_s=10.0) as pusher:
        pusher.connect()
        yield pusher
