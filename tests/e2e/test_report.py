"""The report of a real run: written at its end, named by the summary, with the run's own figures.

That of a run which is stopped: test_failures.
"""

from __future__ import annotations

import re
from html import unescape

from tests.e2e.conftest import GoldenRun

CHARTS = (
    "reward", "entropy", "ratio", "ess", "staleness", "staleness-histogram", "throughput", "shares", "push", "held-out",
)  # fmt: skip


def test_a_run_ends_with_its_report(golden_run: GoldenRun) -> None:
    report = golden_run.run.folder / "report.html"
    assert str(report) in golden_run.quiet
    page = report.read_text(encoding="utf-8")
    body = page[page.index("<main>") : page.index("</main>")]
    text = " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())
    assert "6 of 6 steps" in text
    assert f"{golden_run.run.summary()['ledger']['groups']['trained']} trained" in text
    assert "Bound by" in text
    assert "the trainer waited for samples" in text  # the timeline's
    assert "Best rollouts" in text
    assert [name for name in CHARTS if f'id="chart-{name}"' not in page] == []
