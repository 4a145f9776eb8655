"""Fixtures of the tests of training."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_model import build_tiny_model


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of a policy and of its reference, which is another one; read only."""
    folder = tmp_path_factory.mktemp("models")
    return {name: build_tiny_model(folder / name, seed=seed) for seed, name in enumerate(("model", "reference"))}
