"""One finished run of the quickstart from every side: what it printed, its timeline, its tokens, the inspector and the report."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest

from grpo_async.display.events import JSON_EVENTS
from grpo_async.findings import RunHistory, diagnose
from grpo_async.records import GroupStatus, TokenFlag
from grpo_async.run_directory import RunDir
from grpo_async.store.query import parse_query
from grpo_async.store.rows import RolloutRow
from grpo_async.store.table import RolloutTable
from grpo_async.tracking.timeline import ATTEMPT, Span, read_spans
from tests.e2e.conftest import GoldenRun
from tests.e2e.support import run_command, status_of
from tests.support.stored import read_groups
from tests.support.trace_format import documented_events, read_trace
from tests.viewer.support import answers_by_view
from tests.viewer.web.serving import serving

pytestmark = pytest.mark.slow

_OF_OTHER_RUNS = {
    "checking the checkpoint", "down", "environment", "gone", "old log-probabilities", "reference", "rollout function", "tools",
    "verify weights", "wait for a server", "wait for the last checkpoint",
}  # fmt: skip


# ---- what it prints ----


def test_json_logs_are_the_whole_story_and_nothing_else_is_on_stdout(golden_run: GoldenRun) -> None:
    events = [json.loads(line) for line in golden_run.json_logs.splitlines()]
    names = [event["event"] for event in events]
    assert set(names) <= set(JSON_EVENTS)
    assert (names[0], names[-1]) == ("start", "end")
    assert all(isinstance(event["time"], float) for event in events)
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert all(0.0 <= event["metrics"]["servers/kv_usage"] <= 1.0 for event in steps)
    assert {"phase", "preflight", "example", "evaluation", "servers", "learning"} <= set(names)
    example = next(event for event in events if event["event"] == "example")
    assert (example["step"], [sorted(each) for each in example["completions"]][:1]) == (1, [["reward", "text"]])
    assert any(event["servers"][0]["state"] == "serving" for event in events if event["event"] == "servers")
    assert events[-1]["exit_code"] == 0
    assert events[-1]["summary"]["steps"] == 4
    memory = events[-1]["summary"]["memory"]
    assert [peak > 100 << 20 for peak in memory["peaks"]] == [True]


def test_trackers_get_what_held_out_prompts_got(golden_run: GoldenRun) -> None:
    folder = golden_run.run.folder / "trackers" / "tensorboard"
    assert f"tensorboard: tensorboard --logdir {folder}" in golden_run.json_logs
    written = b"".join(file.read_bytes() for file in folder.iterdir())
    assert all(f"### step {step}, reward ".encode() in written for step in (0, 3, 4, 6))
    assert b"**prompt**" in written
    assert b"**completion**" in written


def test_a_quiet_run_prints_its_summary_only(golden_run: GoldenRun) -> None:
    lines = [line for line in golden_run.quiet.splitlines() if not line.startswith("warning: ")]
    assert lines[0].startswith("learning "), golden_run.quiet
    assert any(line.startswith("run ") and "after 6 steps" in line for line in lines)
    assert not [
        line for line in lines if line.startswith(("step ", "logs:", "held-out at", "held-out before", "engine "))
    ]


def test_status_tells_of_a_finished_run(golden_run: GoldenRun) -> None:
    code, status = status_of(golden_run.run.folder)
    assert (code, status["state"], status["step"], status["exit_code"]) == (0, "finished", 6, 0)
    assert status["checkpoint"]["step"] == 6
    # the report's advice goes by them, and by those of status.json where a run did not come to its end
    assert isinstance(status["on_gpu"], bool)
    assert (status["engine"], status["on_gpu"]) == tuple(
        golden_run.run.summary()[name] for name in ("engine", "on_gpu")
    )


# ---- its timeline ----


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


# ---- its tokens, and the pages that show them ----


def test_every_trained_token_of_a_run_has_its_stats_and_the_metrics_are_their_means(golden_run: GoldenRun) -> None:
    """Two updates in a step, weights that are pushed while groups are generated."""
    run = golden_run.run
    trained: dict[int, list[RolloutRow]] = {}
    for group in read_groups(run.folder / "rollouts"):
        for rollout in group.rollouts:
            if group.status is GroupStatus.TRAINED:
                assert group.step is not None
                trained.setdefault(group.step, []).append(rollout)
            else:
                assert rollout.weights is None
    assert sorted(trained) == [1, 2, 3, 4, 5, 6]
    flags_seen = 0
    for line in run.metrics():
        rollouts = trained[int(line["step"])]
        stats = {name: _of(rollouts, name) for name in ("trainer_logprobs", "weights", "entropies", "token_flags")}
        sampler = np.concatenate([np.array(r.logprobs, dtype=np.float64)[np.array(r.mask) == 1] for r in rollouts])
        weights, difference = stats["weights"], np.abs(stats["trainer_logprobs"] - sampler)
        assert len(weights) == line["num_tokens"]
        assert weights.mean() == pytest.approx(line["sampling/importance_sampling_ratio/mean"], rel=1e-6)
        assert weights.max() == pytest.approx(line["sampling/importance_sampling_ratio/max"], rel=1e-6)
        assert weights == pytest.approx(
            np.exp(stats["trainer_logprobs"] - _of(rollouts, "proximal_logprobs")), rel=1e-4
        )
        assert stats["entropies"].mean() == pytest.approx(line["entropy"], rel=1e-5)
        assert difference.mean() == pytest.approx(line["sampling/sampling_logp_difference/mean"], rel=1e-4, abs=1e-6)
        clipped = (stats["token_flags"].astype(int) & (TokenFlag.CLIPPED_LOW | TokenFlag.CLIPPED_HIGH)) > 0
        assert clipped.mean() == pytest.approx(line["clip_ratio/region_mean"])
        flags_seen += int(clipped.sum())
        ages = [line["step"] - 1 - version for r in rollouts for version in r.versions if version >= 0]
        for age in (0, 1):
            assert ages.count(age) / len(ages) == pytest.approx(line.get(f"async/staleness/{age}", 0.0))
        busy = sum(line[f"pipeline/{name}_fraction"] for name in ("training", "pushing", "checkpoint", "other"))
        assert busy + line["pipeline/trainer_idle_ratio"] == pytest.approx(1.0)
        assert line["pipeline/training_fraction"] > 0.0
        assert line["reward_min"] <= line["reward_p10"] <= line["reward_p50"] <= line["reward_max"]
    assert flags_seen, "no token was clipped: the comparison of flags says little"


def _of(rollouts: list[RolloutRow], name: str) -> np.ndarray:
    """The stats of the sampled tokens of all these rollouts; fails where one is missing, or one too many is there."""
    found = []
    for rollout in rollouts:
        values = getattr(rollout, name)
        assert values is not None
        assert len(values) == len(rollout.mask)
        assert [value is not None for value in values] == [bool(mask) for mask in rollout.mask]
        found.extend(value for value in values if value is not None)
    return np.array(found, dtype=np.float64)


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
