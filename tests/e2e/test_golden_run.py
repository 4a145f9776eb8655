"""One finished run of the quickstart : what it printed, and its tokens."""

from __future__ import annotations

import json
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
from tests.e2e.conftest import GoldenRun
from tests.support.stored import read_groups

pytestmark = pytest.mark.slow


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
    assert (golden_run.run.folder / "report.html").is_file()


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
