"""Losses that are not finite, in a real run: the steps are skipped and counted, and too many in a row end the run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.support import Run, make_run

pytestmark = [pytest.mark.slow, pytest.mark.nightly]

GROUPS_PER_STEP = 2
TINY = (
    f"rollout.groups_per_step={GROUPS_PER_STEP}",
    "rollout.group_size=4",
    "training.max_bad_steps=3",
    "optimizer.warmup_steps=0",
    "evaluation=null",
)


def _run(folder: Path, max_steps: int, function: str, arguments: str) -> Run:
    loss = f"{{type: custom, function: 'tests.e2e.user_losses:{function}', arguments: {arguments}}}"
    rewards = "[{function: 'tests.e2e.soak_reward:by_place'}]"
    return make_run(
        folder,
        "quickstart.yaml",
        (*TINY, f"training.max_steps={max_steps}", f"loss={loss}", f"rewards={rewards}"),
    )


def _assert_closed(line: dict[str, Any]) -> None:
    for kind in ("groups", "tokens"):
        counts = {k.rpartition("/")[2]: v for k, v in line.items() if k.startswith(f"ledger/{kind}/")}
        assert counts.pop("started") == sum(counts.values()), line["step"]


def test_steps_that_are_not_finite_are_skipped_and_counted_and_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    """Steps 2, 3 and 5 are, and from step 7 on all of them; three in a row are the limit."""
    arguments = "{not_a_number: [2, 3, 5], infinite_from: 7}"
    run = _run(tmp_path, 5000, "not_finite", arguments)
    done = run.train(timeout_s=120.0)
    assert done.returncode == 1, done.stdout[-3000:]
    assert "step 9 had loss" in done.stdout
    assert "inf" in done.stdout
    bad = [2, 3, 5, 7, 8, 9]
    lines = run.metrics()
    assert [line["step"] for line in lines] == list(range(1, 10))
    assert [line["step"] for line in lines if line["training/skipped_updates"] == 1.0] == bad
    assert [line["step"] for line in lines if line["loss"] is None] == bad  # JSON has no NaN
    for line in lines:
        _assert_closed(line)
        assert line["ledger/groups/failed"] == GROUPS_PER_STEP * sum(step <= line["step"] for step in bad)
    assert lines[-1]["ledger/groups/trained"] == GROUPS_PER_STEP * 3
    assert lines[-1]["ledger/tokens/failed"] > 0
    assert (run.folder / "checkpoints" / "step_9" / "state.json").exists()
    run.assert_nothing_is_left()
