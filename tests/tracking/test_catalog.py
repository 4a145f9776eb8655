"""The metrics' catalog: reductions worked by hand; that it is whole is tested with a real run in tests/e2e/test_train.py."""

from __future__ import annotations

from grpo_async.tracking.catalog import CATALOG, REDUCTIONS, describe


def test_a_reduction_makes_one_value_of_several() -> None:
    # mean, min, max, sum, last
    assert [reduce([1.0, 4.0, 1.0]) for reduce in REDUCTIONS.values()] == [2.0, 1.0, 4.0, 6.0, 1.0]
    assert {entry.reduction for entry in CATALOG} == REDUCTIONS.keys()


def test_every_entry_can_be_reached() -> None:
    """An entry behind a pattern that fits its name, too, would never be seen."""
    for entry in CATALOG:
        name, text = (
            each.replace("{percent}", "90").replace("{", "").replace("}", "") for each in (entry.name, entry.help)
        )
        assert describe(name).help.split(":")[0] in text.split(":")[0], name
