"""The report of a real run: written at its end, named by the summary, with the run's own numbers.

That of a run which is stopped: test_failures.
"""

from __future__ import annotations

import pytest

from grpo_async.findings import RunHistory, diagnose
from grpo_async.run_directory import RunDir
from grpo_async.store.table import RolloutTable
from tests.e2e.conftest import GoldenRun
from tests.viewer.support import answers_by_view

PLOTS = {
    "reward", "entropy", "ratio", "ess", "staleness", "staleness-ages", "throughput", "trainer-time", "push", "held-out",
}  # fmt: skip


def test_a_run_ends_with_its_report(golden_run: GoldenRun) -> None:
    report = golden_run.run.folder / "report.html"
    assert str(report) in golden_run.quiet
    found = answers_by_view(report)
    statistics = {name: note for name, _, note in found["run"]["statistics"]}
    assert "6 of 6 steps" in found["run"]["outcome"]
    assert f"{golden_run.run.summary()['ledger']['groups']['trained']} trained" in statistics["groups"]
    assert found["run"]["advice"]
    assert "the trainer waited for samples" in [row[0] for row in found["waits"]["rows"]]
    assert found["extremes"]["best"]
    assert found["rollout"]["tokens"]["texts"]
    assert {plot["name"] for chapter in found["curves"]["chapters"] for plot in chapter["plots"]} >= PLOTS


def test_every_view_tells_the_same_reward_of_a_step_and_the_same_verdict(golden_run: GoldenRun) -> None:
    """Filtered groups count in both: the store's mean over the rows of a step is what metrics.jsonl says."""
    folder = golden_run.run.folder
    history = RunHistory.read(RunDir(folder))
    with RolloutTable.open(folder / "rollouts") as table:
        stored = {step.step: step.reward_mean for step in table.by_step() if step.step is not None}
    assert stored == pytest.approx({int(row["step"]): row["reward"] for row in history.metrics})
    assert golden_run.run.summary()["learning"]["text"] == diagnose(history).text
