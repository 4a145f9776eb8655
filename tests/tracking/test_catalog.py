"""The metrics' catalog: reductions worked by hand; that it is whole is tested with a real run in tests/e2e/test_train.py."""

from __future__ import annotations

import pytest

from grpo_async.tracking.catalog import CATALOG, Better, Reduction, describe


def test_the_name_that_is_written_out_comes_before_the_pattern_which_names_its_part() -> None:
    assert describe("rewards/judge/v2/mean").help == "mean of the reward `judge/v2`"
    assert describe("tools/python/failure_frequency").help == "fraction of the calls of `python` that failed"
    assert describe("sync/phase/pause_s").help == "seconds of the push until every server had paused"
    assert describe("sync/phase/transfer_s").help == "seconds of the push: transfer"
    assert describe("eval/reward").better is Better.HIGHER
    info = describe("my/own")  # an unknown one is a mean and says so
    assert (info.name, info.reduction, info.is_known) == ("my/own", Reduction.MEAN, False)


def test_a_reduction_makes_one_value_of_several() -> None:
    # mean, min, max, sum, last
    assert [reduction([1.0, 4.0, 1.0]) for reduction in Reduction] == [2.0, 1.0, 4.0, 6.0, 1.0]
    with pytest.raises(ValueError, match="no value to take the mean of"):
        Reduction.MEAN([])


def test_every_entry_can_be_reached() -> None:
    """An entry behind a pattern that fits its name, too, would never be seen."""
    for entry in CATALOG:
        name, text = (
            each.replace("{percent}", "90").replace("{", "").replace("}", "") for each in (entry.name, entry.help)
        )
        assert describe(name).help.split(":")[0] in text.split(":")[0], name
