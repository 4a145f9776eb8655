"""However a step is cut, it is the same step, with every loss, KL, correction, masks and several updates: packed, with shared
prefixes once, = unpacked, 1 x 8 = 8 x 1, 1 rank = 2 ranks."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from grpo_async.records import TokenFlag
from tests.support.ranks import run_on_ranks
from tests.training.statistics_jobs import MODULE

pytestmark = pytest.mark.slow

_COMMON: dict[str, Any] = {
    "proximal": "recomputed",
    "beta": 0.1,
    "off_policy_mask": 0.001,
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
    "centered": {
        "type": "dapo",
        "epsilon": 0.05,
        **_SUM,
        "proximal": "log_linear",
        "correction": _TOKENS,
        "score_centering": 5,
    },
    "luspo": {"type": "luspo", **_COMMON, "correction": _SEQUENCES},
    "dppo": {"type": "dppo", "epsilon": 0.02, **_COMMON, "geometric_mask": (0.9, 1.3), "correction": _MASKED},
    "cispo": {"type": "cispo", "epsilon_high": 1.1, **_SUM, "correction": _TOKENS},
    "sapo": {"type": "sapo", **_COMMON, "correction": _MASKED},
    "custom": {
        "type": "custom",
        "function": "tests.training.test_objective:reinforce",
        **_COMMON,
        "correction": _TOKENS,
    },
}


@pytest.fixture(scope="module")
def plain(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One rank, one sample per row, everything of a minibatch in one micro-batch."""
    folder = tmp_path_factory.mktemp("plain")
    return run_on_ranks("train", 1, folder, module=MODULE, **models, losses=LOSSES, minibatches=2, pack=False)


def _assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert other["updates"] == one["updates"] == [True, True]
    assert other["tokens"] == one["tokens"]
    # rows are cut differently, and padded ones share nothing
    layout = ("training/padding_fraction", "training/shared_fraction", "training/computed_tokens")
    of_one, of_other = ({k: v for k, v in each["metrics"].items() if k not in layout} for each in (one, other))
    assert of_other == pytest.approx(of_one, rel=1e-4, abs=1e-6)
    assert other["weights"] == pytest.approx(one["weights"], rel=1e-4, abs=2e-3)


def _assert_same_statistics(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["statistics"].keys() == other["statistics"].keys()
    for rollout_id, rows in one["statistics"].items():
        mine = other["statistics"][rollout_id]
        for name in ("logprobs", "proximal_logprobs", "weights", "entropies"):
            assert mine[name] == pytest.approx(rows[name], rel=2e-4, abs=1e-4), (rollout_id, name)
        assert mine["flags"] == rows["flags"], rollout_id


@pytest.mark.parametrize(
    ("world_size", "settings"),
    [
        (1, {}),  # packed
        (1, {"pack": False, "micro_batch_tokens": 78}),  # rows of up to 39 tokens: two or more samples in a micro-batch
        (2, {"micro_batch_tokens": 64}),  # packed, several micro-batches, two ranks
        (4, {"num_nodes": 2, "pack": False, "micro_batch_tokens": 78}),  # 2 x 2: hybrid sharding
        (2, {"context_parallel": 2, "micro_batch_tokens": 32}),  # less than the longest sample
        (4, {"context_parallel": 2, "num_nodes": 2, "pack": False, "micro_batch_tokens": 39}),
    ],
    ids=["packed", "many-micro-batches", "two-ranks", "hybrid", "context-parallel", "context-parallel-hybrid"],
)
def test_every_loss_is_the_same_however_a_step_is_cut(
    models: dict[str, Path], tmp_path: Path, plain: dict[str, Any], world_size: int, settings: dict[str, Any]
) -> None:
    """Two updates, by the loop of rank 0 and its followers; and every rollout has the same statistics of its tokens."""
    losses = LOSSES if world_size < 4 else {name: LOSSES[name] for name in ("grpo", "centered", "luspo")}
    results = run_on_ranks(
        "train", world_size, tmp_path, module=MODULE, **models, losses=losses, minibatches=2, **settings
    )
    for name in losses:
        assert len(results[name]["statistics"]) == 12
        _assert_same(plain[name], results[name])
        _assert_same_statistics(plain[name], results[name])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_two_ranks_on_one_device_make_the_step_of_one(
    models: dict[str, Path], tmp_path: Path, device: str, dtype: str
) -> None:
    """On a GPU: FSDP and all-to-all over NCCL, moments in 8 bits there, and with bfloat16 attention by the varlen kernel."""
    losses = {name: LOSSES[name] for name in ("grpo", "luspo")}
    settings: dict[str, Any] = {"losses": losses, "minibatches": 2, "optimizer": "adamw_8bit", "micro_batch_tokens": 64}
    settings |= {"device": device, "compute_dtype": dtype, **models}
    one, divided, together = (
        run_on_ranks("train", ranks, tmp_path / f"{ranks}_{each}", module=MODULE, context_parallel=each, **settings)
        for ranks, each in ((1, 1), (2, 1), (2, 2))
    )
    for two, name in product((divided, together), losses):
        if dtype == "float32":
            _assert_same(one[name], two[name])
            _assert_same_statistics(one[name], two[name])
        else:  # 0.03 and 0.001 on a CPU
            for rollout_id, rows in one[name]["statistics"].items():
                assert two[name]["statistics"][rollout_id]["logprobs"] == pytest.approx(rows["logprobs"], abs=0.1)
            assert two[name]["metrics"]["grad_norm"] == pytest.approx(one[name]["metrics"]["grad_norm"], rel=0.02)


def test_a_rank_without_samples_and_groups_that_are_not_stored_do_no_harm(
    models: dict[str, Path], tmp_path: Path
) -> None:
    """Two groups of two samples in two updates on three ranks: each update leaves one rank with nothing. Of the first only it is
    stored, and the second one's update is not finite."""
    losses = {"grpo": {"type": "grpo", "beta": 0.1}}  # the reference answers all ranks together, too
    settings: dict[str, Any] = {"losses": losses, "num_groups": 2, "minibatches": 2, "pack": False}
    every = run_on_ranks("train", 3, tmp_path / "three", module=MODULE, **models, poisoned=[1], **settings)["grpo"]
    alone = run_on_ranks("train", 1, tmp_path / "one", module=MODULE, **models, kept=[0], **settings)["grpo"]
    assert every["updates"] == [True, False]
    assert sorted(every["statistics"]) == ["g0-r0", "g0-r1", "g1-r0", "g1-r1"]
    assert sorted(alone["statistics"]) == ["g0-r0", "g0-r1"]
    for rollout_id, rows in every["statistics"].items():
        assert {int(flag) & TokenFlag.SKIPPED for flag in rows["flags"]} == {
            TokenFlag.SKIPPED if rollout_id.startswith("g1") else 0
        }
    kept = {"statistics": {key: rows for key, rows in every["statistics"].items() if key.startswith("g0")}}
    _assert_same_statistics(alone, kept)


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
        assert {flag for row in plain[name]["statistics"].values() for flag in row["flags"]} - {0.0}, name
    weights = [plain[name]["weights"] for name in LOSSES]
    assert all(one != other for index, one in enumerate(weights) for other in weights[:index])
