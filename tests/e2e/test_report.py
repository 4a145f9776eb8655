"""The report of a real run: written at its end, named by the summary, with the run's own numbers.

That of a run which is stopped: test_failures.
"""

from __future__ import annotations

import re
from html import unescape

import pytest

from grpo_async.findings import Evidence, judge
from grpo_async.run_directory import RunDir
from grpo_async.store.table import RolloutTable
from tests.e2e.conftest import GoldenRun

CHARTS = (
    "reward", "entropy", "ratio", "ess", "staleness", "staleness-ages", "throughput", "trainer-time", "push", "held-out",
)  # fmt: skip


def test_a_run_ends_with_its_report(golden_run: GoldenRun) -> None:
    report = golden_run.run.folder / "report.html"
    assert str(report) in golden_run.quiet
    page = report.read_text(encoding="utf-8")
    body = page[page.index("<main>") : page.index("</main>")]
    text = " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())
    assert "6 of 6 steps" in text
    assert f"{golden_run.run.summary()['ledger']['groups']['trained']} trained" in text
    assert "Bottleneck:" in text
    assert "the trainer waited for samples" in text  # the timeline's
    assert "Best rollouts" in text
    assert [name for name in CHARTS if f'id="chart-{name}"' not in page] == []


def test_every_view_tells_the_same_reward_of_a_step_and_the_same_verdict(golden_run: GoldenRun) -> None:
    """Filtered groups count in both: the store's mean over the rows of a step is what metrics.jsonl says."""
    folder = golden_run.run.folder
    evidence = Evidence.read(RunDir(folder))
    with RolloutTable.open(folder / "rollouts") as table:
        stored = {step.step: step.reward_mean for step in table.by_step() if step.step is not None}
    assert stored == pytest.approx({int(row["step"]): row["reward"] for row in evidence.metrics})
    assert golden_run.run.summary()["learning"]["text"] == judge(evidence).text
