"""A policy that stays as it is, and a reward that takes the longer the longer the completions are."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest

from grpo_async.records import GroupStatus
from tests.e2e.support import make_run, rewards
from tests.support.stored import read_groups

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


@pytest.mark.timeout(900)
def test_an_asynchronous_run_trains_the_groups_of_a_synchronous_one_and_loses_no_slow_one(tmp_path: Path) -> None:
    trained, lengths = [], []
    for max_staleness in (0, 1):
        settings = (
            "rollout.groups_per_step=4",
            "rollout.group_size=2",
            f"rollout.max_staleness={max_staleness}",
            rewards("user_rewards:by_place_and_slow_by_length"),
            "training.max_steps=10",
            "optimizer.lr=1.0e-30",
            "evaluation=null",
        )
        run = make_run(tmp_path, "quickstart.yaml", settings, name=f"staleness-{max_staleness}")
        assert run.complete(timeout_s=400.0)[0]["staleness_max"] == max_staleness
        steps = defaultdict(set)
        for group in read_groups(run.folder / "rollouts"):
            assert group.status is GroupStatus.TRAINED, group
            steps[group.step].add(group.group_id)
            lengths.append(max(len(rollout.completion_ids) for rollout in group.rollouts))
        trained.append(steps)
    assert trained[0] == trained[1]
    assert max(lengths) > 3 * min(lengths), "groups should differ in how long they take"
