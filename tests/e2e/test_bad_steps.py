"""Losses that are not finite, in a real run: the steps are skipped and counted, and too many in a row end the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.support import SMALL, assert_ledger_closes_at_every_step, make_run, rewards

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_steps_that_are_not_finite_are_skipped_and_counted_and_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    """Steps 2, 3 and 5 are, and from step 7 on all of them; three in a row are the limit."""
    loss = "{type: custom, function: 'tests.e2e.user_losses:not_finite', arguments: {not_a_number: [2, 3, 5], infinite_from: 7}}"
    settings = (
        "rollout.groups_per_step=2",
        "training.max_steps=5000",
        "evaluation=null",
        f"loss={loss}",
    )
    run = make_run(tmp_path, "quickstart.yaml", (*SMALL, *settings, rewards("user_rewards:by_place")))
    printed = run.fail()
    assert "step 9 had loss" in printed
    assert "inf" in printed
    bad = [2, 3, 5, 7, 8, 9]
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert [line["step"] for line in lines if line["training/skipped_updates"] == 1.0] == bad
    assert [line["step"] for line in lines if line["loss"] is None] == bad  # JSON has no NaN
    assert_ledger_closes_at_every_step(lines)
    for line in lines:
        assert line["ledger/groups/failed"] == 2 * sum(step <= line["step"] for step in bad)
    assert lines[-1]["ledger/groups/trained"] == 2 * 3
    assert lines[-1]["ledger/tokens/failed"] > 0
    assert run.checkpoints()[-1] == 9
