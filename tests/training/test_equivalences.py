"""However a step is cut, it is the same step: packed = unpacked, 1 x 8 = 8 x 1, 1 rank = 2 ranks (design, invariant 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import build_tiny_model


def _assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert other["losses"] == pytest.approx(one["losses"], rel=1e-4, abs=1e-6)
    assert other["norms"] == pytest.approx(one["norms"], rel=1e-4)
    assert other["tokens"] == one["tokens"]
    assert other["metrics"] == pytest.approx(one["metrics"], rel=1e-3, abs=1e-6)
    assert other["weights"] == pytest.approx(one["weights"], rel=1e-4, abs=2e-3)


@pytest.fixture(scope="module")
def reference(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank, one sample per row, everything in one micro-batch."""
    folder = tmp_path_factory.mktemp("reference")
    return run_on_ranks("train_two_steps", 1, folder, model=tiny_model, pack=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (1, {}),  # packed
        (1, {"pack": False, "micro_batch_tokens": 40}),  # one or a few samples per micro-batch
        (2, {"micro_batch_tokens": 64}),  # packed, several micro-batches, two ranks
    ],
    ids=["packed", "many-micro-batches", "two-ranks"],
)
def test_a_step_is_the_same_however_it_is_cut(
    tiny_model: Path, tmp_path: Path, reference: dict[str, Any], num_ranks: int, settings: dict[str, Any]
) -> None:
    _assert_same(reference, run_on_ranks("train_two_steps", num_ranks, tmp_path, model=tiny_model, **settings))


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied-head", "own-head"])
def test_a_rank_without_samples_takes_part_and_changes_nothing(tmp_path: Path, tied: bool) -> None:
    model = build_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    one = run_on_ranks("train_fewer_samples_than_ranks", 1, tmp_path / "one", model=model)
    two = run_on_ranks("train_fewer_samples_than_ranks", 2, tmp_path / "two", model=model)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-4, abs=2e-3)
