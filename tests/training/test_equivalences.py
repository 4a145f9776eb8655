"""However a step is cut, it is the same step, with every loss, KL, correction, masks and several updates: packed = unpacked,
1 x 8 = 8 x 1, 1 rank = 2 ranks (design, invariant 4)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import build_tiny_model

pytestmark = pytest.mark.slow

_COMMON: dict[str, Any] = {
    "proximal": "recomputed",
    "beta": 0.1,
    "off_policy_mask": 0.05,
    "entropy_bonus": 0.01,
}
# the off-policy mask looks at whole samples: without it a loss with weights by token is a sum over tokens
_SUM = _COMMON | {"off_policy_mask": None}
_TOKENS = {"level": "token", "action": "mask", "cap": 1.25, "floor": 0.8}
_SEQUENCES = {"level": "sequence", "action": "truncate", "cap": 1.5, "floor": 0.8}
_MASKED = {"level": "sequence", "action": "mask", "cap": 3.0}
LOSSES: dict[str, dict[str, Any]] = {
    "grpo": {"type": "grpo", **_SUM, "correction": _TOKENS},
    "dr_grpo": {"type": "dr_grpo", **_COMMON, "correction": _SEQUENCES},
    "dapo": {"type": "dapo", "delta": 1.4, **_COMMON, "correction": _MASKED},
    "log_linear": {"type": "dapo", **_COMMON, "proximal": "log_linear", "correction": _SEQUENCES},
    "gspo": {"type": "gspo", **_COMMON, "correction": _SEQUENCES},
    "cispo": {"type": "cispo", "epsilon_high": 1.1, **_SUM, "correction": _TOKENS},
    "sapo": {"type": "sapo", **_COMMON, "correction": _MASKED},
    "custom": {
        "type": "custom",
        "function": "tests.training.test_losses_user:reinforce",
        **_COMMON,
        "correction": _TOKENS,
    },
}
BNPO = {"bnpo": {"type": "bnpo", **_SUM, "correction": _TOKENS}}


@pytest.fixture(scope="module")
def plain(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank, one sample per row, everything in one micro-batch."""
    folder = tmp_path_factory.mktemp("plain")
    return run_on_ranks("train_with_each_loss", 1, folder, **models, losses=LOSSES | BNPO, pack=False)


def _assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert other["updates"] == one["updates"] == [True, True]
    assert other["tokens"] == one["tokens"]
    assert other["metrics"] == pytest.approx(one["metrics"], rel=1e-4, abs=1e-6)
    assert other["weights"] == pytest.approx(one["weights"], rel=1e-4, abs=2e-3)


@pytest.mark.parametrize(
    ("num_ranks", "settings"),
    [
        (1, {}),  # packed
        (1, {"pack": False, "micro_batch_tokens": 78}),  # rows of up to 39 tokens: two or more samples in a micro-batch
        (2, {"micro_batch_tokens": 64}),  # packed, several micro-batches, two ranks
    ],
    ids=["packed", "many-micro-batches", "two-ranks"],
)
def test_every_loss_is_the_same_however_a_step_is_cut(
    models: dict[str, Path], tmp_path: Path, plain: dict[str, Any], num_ranks: int, settings: dict[str, Any]
) -> None:
    results = run_on_ranks("train_with_each_loss", num_ranks, tmp_path, **models, losses=LOSSES, **settings)
    for name in LOSSES:
        _assert_same(plain[name], results[name])


def test_the_masks_and_weights_of_these_runs_act(plain: dict[str, Any]) -> None:
    """Otherwise the equalities above would say little."""
    for name, values in LOSSES.items():
        first = plain[name]["metrics"]
        if values["off_policy_mask"] is not None:
            assert 0.0 < first["masked/off_policy"] < 1.0
        assert first["kl"] > 0.0
        if values["correction"]["action"] == "mask":
            assert 0.0 < first["masked/correction"] < 1.0
        assert first["sampling/ess"] < 1.0
    weights = [plain[name]["weights"] for name in LOSSES]
    assert all(one != other for index, one in enumerate(weights) for other in weights[:index])


def test_bnpo_is_the_same_on_two_ranks_with_the_same_micro_batches_and_not_otherwise(
    models: dict[str, Path], tmp_path: Path, plain: dict[str, Any]
) -> None:
    """One sample in each micro-batch, on one rank or two: bnpo is then grpo, and does not care who has which."""
    cut = {"one_by_one": True, "losses": BNPO}
    one = run_on_ranks("train_with_each_loss", 1, tmp_path / "one", **models, **cut)
    two = run_on_ranks("train_with_each_loss", 2, tmp_path / "two", **models, **cut)
    _assert_same(one["bnpo"], two["bnpo"])
    assert one["bnpo"]["weights"] != pytest.approx(plain["bnpo"]["weights"], rel=1e-4, abs=2e-3)


@pytest.mark.parametrize("tied", [True, False], ids=["tied-head", "own-head"])
def test_a_rank_without_samples_takes_part_and_changes_nothing(tmp_path: Path, tied: bool) -> None:
    model = build_tiny_model(tmp_path / "model", tie_word_embeddings=tied)
    one = run_on_ranks("train_fewer_samples_than_ranks", 1, tmp_path / "one", model=model)
    two = run_on_ranks("train_fewer_samples_than_ranks", 2, tmp_path / "two", model=model)
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-4)
    assert two["weights"] == pytest.approx(one["weights"], rel=1e-4, abs=2e-3)
