"""The metrics' catalogue: reductions worked by hand; that it is whole is tested with a real run in tests/e2e/test_train.py."""

from __future__ import annotations

import pytest

from grpo_async.tracking.catalog import CATALOG, Better, Reduction, describe, reduce_metrics


def test_a_pattern_names_its_part() -> None:
    assert describe("rewards/length/mean").help == "mean of the reward `length`"
    assert describe("rewards/judge/v2/mean").help == "mean of the reward `judge/v2`"
    assert describe("tools/python/failure_frequency").help == "share of the calls of `python` that failed"


def test_the_name_that_is_written_out_beats_the_pattern() -> None:
    assert describe("sync/bytes_per_s").unit == "bytes/s"
    assert describe("sync/gather_s").unit == "s"
    assert describe("tools/failure_frequency").help.startswith("share of a completion's calls")
    assert describe("eval/reward").better is Better.HIGHER


def test_an_unknown_metric_is_a_mean_and_says_so() -> None:
    info = describe("my/own")
    assert (info.name, info.reduction, info.is_known) == ("my/own", Reduction.MEAN, False)


@pytest.mark.parametrize(
    ("reduction", "expected"), [("mean", 2.0), ("min", 1.0), ("max", 4.0), ("sum", 6.0), ("last", 1.0)]
)
def test_a_reduction(reduction: str, expected: float) -> None:
    assert Reduction(reduction)([1.0, 4.0, 1.0]) == expected


def test_no_value_has_no_reduction() -> None:
    with pytest.raises(ValueError, match="no value to take the mean of"):
        Reduction.MEAN([])


def test_steps_become_one_by_each_metrics_reduction() -> None:
    rows = [
        {"reward": 1.0, "num_tokens": 10.0, "completions/max_length": 9.0, "ledger/groups/trained": 8.0},
        {"reward": 2.0, "num_tokens": 20.0, "completions/max_length": 5.0, "ledger/groups/trained": 16.0, "kl": 0.5},
    ]
    assert reduce_metrics(rows) == {
        "reward": 1.5,  # (1 + 2) / 2
        "num_tokens": 30.0,
        "completions/max_length": 9.0,
        "ledger/groups/trained": 16.0,
        "kl": 0.5,
    }


def test_every_entry_can_be_reached() -> None:
    """An entry behind a pattern that fits its name, too, would never be seen."""
    for entry in CATALOG:
        name = entry.name.replace("{percent}", "90").replace("{", "").replace("}", "")
        found = describe(name)
        assert (
            found.help.split(":")[0]
            in entry.help.replace("{percent}", "90").replace("{", "").replace("}", "").split(":")[0]
        ), name
