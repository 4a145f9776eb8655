"""The inspector and the report on a run of the real quickstart: what the trainer found for each token reaches their pages.

The report of a run that is stopped: test_failures.
"""

from __future__ import annotations

from statistics import fmean

import pytest

from grpo_async.findings import RunHistory, diagnose
from grpo_async.run_directory import RunDir
from grpo_async.store.query import parse_query
from grpo_async.store.table import RolloutTable
from tests.e2e.conftest import GoldenRun
from tests.support.stored import read_groups
from tests.viewer.support import answers_by_view
from tests.viewer.web.serving import serving


def test_a_real_run_is_looked_at_from_its_steps_down_to_its_tokens(golden_run: GoldenRun) -> None:
    folder = golden_run.run.folder
    stored = {each.rollout_id: each for group in read_groups(RunDir(folder).rollouts) for each in group.rollouts}
    with serving(folder) as inspector:
        for step in range(1, 7):
            assert inspector.json("api/rollouts", q=f"trained and step={step}", limit=1)["rows"]
        row = inspector.json("api/rollouts", q="trained and step=6", limit=1)["rows"][0]
        tokens = inspector.json("api/rollout", id=row["rollout_id"], seq=row["seq"])["tokens"]
        rollout = stored[row["rollout_id"]]
        assert tokens["trainer_logprobs"] == rollout.trainer_logprobs
        assert tokens["entropies"] == rollout.entropies
        assert (tokens["texts"][0], tokens["texts_missing"]) == ("<think>", None)
        (run,) = inspector.json("api/runs")["runs"]
        evaluation = run["evaluations"][-1]
        assert evaluation["step"] == 6
        assert inspector.json("api/status", run=evaluation["name"])["counts"]["groups"] == 16


def test_a_run_ends_with_its_report(golden_run: GoldenRun) -> None:
    report = golden_run.run.folder / "report.html"
    assert str(report) in golden_run.quiet
    found = answers_by_view(report)
    assert "6 of 6 steps" in found["run"]["outcome"]
    assert found["rollout"]["tokens"]["texts"]
    plots = {plot["name"] for chapter in found["curves"]["chapters"] for plot in chapter["plots"]}
    assert plots >= {"reward", "ess", "staleness", "throughput", "push", "held-out"}


def test_every_view_tells_the_same_reward_of_a_step_and_the_same_verdict(golden_run: GoldenRun) -> None:
    """Filtered groups count in both: the store's mean over the rows of a step is what metrics.jsonl says."""
    history = RunHistory.read(RunDir(golden_run.run.folder))
    rewards: dict[int, list[float]] = {}
    with RolloutTable(golden_run.run.folder / "rollouts") as table:
        for row in table.page(parse_query("step is not null and reward is not null"), limit=10_000):
            rewards.setdefault(row["step"], []).append(row["reward"])
    stored = {step: fmean(values) for step, values in rewards.items()}
    assert stored == pytest.approx({int(row["step"]): row["reward"] for row in history.metrics})
    assert golden_run.run.summary()["learning"]["text"] == diagnose(history).text
