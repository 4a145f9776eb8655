"""The report of a real run: written at its end, named by the summary, and right about what happened; also after a stop."""

from __future__ import annotations

import re
import signal
from html import unescape
from pathlib import Path

import pytest

from tests.e2e.support import finish, make_run

pytestmark = pytest.mark.slow

SMALL = ("rollout.groups_per_step=4", "rollout.group_size=4", "evaluation.num_prompts=8")


def _text(page: str) -> str:
    body = page[page.index("<main>") : page.index("</main>")]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_a_run_ends_with_its_report(tmp_path: Path) -> None:
    # every group has the same rewards: nothing rises or falls by chance
    more = ("training.max_steps=8", "optimizer.lr=1.0e-9", "record.report=true")
    reward = "rewards=[{function: 'tests.e2e.soak_reward:by_place'}]"
    run = make_run(tmp_path, "quickstart.yaml", (*SMALL, *more, reward))
    summary, output = run.complete()
    report = run.folder / "report.html"
    assert report.is_file()
    assert f"{report}    # open it in a browser" in output
    page = report.read_text(encoding="utf-8")
    text = _text(page)
    assert "The run finished after 8 of 8 steps" in text
    assert "No. The policy hardly moves." in text
    assert "(1e-09 in the last step)" in text
    assert f"{summary['ledger']['groups']['trained']} trained" in text
    assert "Bound by" in text
    assert "the trainer waited for samples" in text  # the timeline's
    assert "Best rollouts" in text
    for name in (
        "reward",
        "entropy",
        "ratio",
        "ess",
        "staleness",
        "staleness-histogram",
        "throughput",
        "shares",
        "push",
        "held-out",
    ):
        assert f'id="chart-{name}"' in page, name


def test_a_run_that_is_stopped_has_a_report_too(tmp_path: Path) -> None:
    run = make_run(tmp_path, "quickstart.yaml", (*SMALL, "training.max_steps=200", "record.report=true"))
    process = run.start()
    run.wait_for_step(2, process)
    process.send_signal(signal.SIGINT)
    finish(process, timeout_s=120)
    text = _text((run.folder / "report.html").read_text(encoding="utf-8"))
    assert "The run was stopped after" in text
    assert "of 200 steps" in text
