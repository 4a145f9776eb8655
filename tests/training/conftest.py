"""Fixtures of the tests of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_model import build_tiny_model
from tests.training.tiny_models import save_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a policy and of its reference, which is another one; read only."""
    folder = tmp_path_factory.mktemp("models")
    return {name: build_tiny_model(folder / name, seed=seed) for seed, name in enumerate(("model", "reference"))}


@pytest.fixture(scope="session")
def tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model whose head is its embedding; read only."""
    return save_model(tmp_path_factory.mktemp("model"), "qwen3", tied=True, vocab_size=320)
