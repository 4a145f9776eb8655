"""The timeline of a real run: every kind of work is in it, it fits together, and a resume goes on in the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_async.tracking.timeline import ATTEMPT, Span, read_spans
from tests.e2e.conftest import GoldenRun
from tests.e2e.support import run_command
from tests.support.trace_format import documented_events, read_trace

_OF_OTHER_RUNS = {
    "checking the checkpoint", "down", "environment", "gone", "old log-probabilities", "reference", "rollout function", "tools",
    "verify weights", "wait for a server", "wait for the last checkpoint",
}  # fmt: skip


@pytest.fixture(scope="module")
def spans(golden_run: GoldenRun) -> list[Span]:
    return list(read_spans(golden_run.run.folder / "events.jsonl"))


def test_every_kind_of_work_is_in_the_timeline(spans: list[Span]) -> None:
    assert documented_events() - _OF_OTHER_RUNS - {span["name"] for span in spans} == set()


def test_each_step_of_both_attempts_has_its_parts(spans: list[Span]) -> None:
    marks = [span["details"] for span in spans if span["name"] == ATTEMPT and span["start"] == span["end"]]
    assert [mark["attempt"] for mark in marks] == ["1", "2"]
    assert "resume_step" not in marks[0]
    assert marks[1]["resume_step"] == 4
    for name in ("step", "wait for samples", "train", "close groups", "log"):
        of_name = [span["details"] for span in spans if span["name"] == name]
        assert [details["step"] for details in of_name if "step" in details] == [1, 2, 3, 4, 5, 6]
    pushes = [span["details"]["version"] for span in spans if span["name"] == "push"]
    assert pushes == [0, 0, 1, 2, 3, 4, 4, 4, 5, 6]  # the first of each attempt is of other weights


def test_generation_and_training_overlap(spans: list[Span]) -> None:
    training = [span for span in spans if span["name"] == "train"]
    generating = [span for span in spans if span["name"] == "generate"]
    assert any(
        each["start"] < train["end"] and train["start"] < each["end"] for train in training for each in generating
    )


def test_the_trace_of_the_run_keeps_the_rules_of_its_format(golden_run: GoldenRun, tmp_path: Path) -> None:
    out = tmp_path / "trace.json.gz"
    done = run_command("trace", str(golden_run.run.folder), "--out", str(out))
    assert done.returncode == 0, done.stderr
    assert len(read_trace(out)) > 50
