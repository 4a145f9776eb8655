"""One real vLLM server for the whole folder, and Hugging Face models to compare it with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.vllm.reference import Reference
from tests.vllm.server import VllmServer, experiment, running_server


@pytest.fixture(scope="session")
def vllm_server(needs_vllm: None, tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """Shared: a test brings the weights it needs by pushing them, and leaves the server running and not paused."""
    with running_server(experiment(str(tiny_model)), tmp_path_factory.mktemp("vllm")) as server:
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
