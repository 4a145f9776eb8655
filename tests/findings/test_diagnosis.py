"""Is it learning? Labeled runs, each diagnosed by its label, and how often chance is called a change."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from grpo_async import api
from grpo_async.display.status import read_status
from grpo_async.findings import Diagnosis, RunHistory, diagnose
from grpo_async.findings.statistics import held_out_change, trend
from grpo_async.records import RolloutGroup, ScoredGroup
from grpo_async.rewards.call import RewardError
from grpo_async.rollout.worker import why_no_signal
from grpo_async.run_directory import RunDir
from tests.findings.support import Run, line, peak
from tests.support.records import make_completion, make_prompt


def _all_rewards_0() -> str:
    """As a run ends in which every group has the same rewards."""
    group = RolloutGroup(prompt=make_prompt(1), completions=[make_completion("a"), make_completion("b")])
    why = why_no_signal(ScoredGroup(group=group, samples=[], rewards=[0.0, 0.0], reward_parts=[{}, {}]))
    return f"80 groups in a row had nothing to learn from\nof the last one {why}\n`grpo-async inspect-rollouts` shows"


RAISES = str(RewardError("exact_answer", "raised KeyError: 'answer' (rewards.py:12)"))
WITH_EVALUATION = {"evaluation": {"data": {"type": "jsonl"}}}
STALE = {"async/staleness_mean": 1.0}
STILL = {"sampling/importance_sampling_ratio/min": 0.9999, "sampling/importance_sampling_ratio/max": 1.0001}

RUNS: dict[str, tuple[Run, str, bool | None]] = {
    "learns": (Run(reward=line(0.2, 0.9), held_out={0: 0.2, 30: 0.5, 60: 0.85}, baseline=0.12), "learns", True),
    "learns, the last evaluation failed": (
        Run(reward=line(0.2, 0.7), held_out={0: 0.2}, failed_evaluations={60: "a server is gone"}, config=WITH_EVALUATION),
        "learns", True,
    ),
    "learns in few steps that held-out prompts confirm": (
        Run(reward=line(0.2, 0.8), num_steps=4, held_out={0: 0.2, 4: 0.8}, num_prompts=200), "learns", True
    ),
    "only the most frequent answer": (
        Run(reward=line(0.02, 0.2), held_out={0: 0.02, 60: 0.2}, num_prompts=200, baseline=0.2), "baseline", False
    ),
    "all rewards 0": (Run(state="failed", error=_all_rewards_0()), "zero-variance", False),
    "almost no group differs": (
        Run(reward=line(0.01, 0.01), metrics={"frac_reward_zero_std": 0.95}), "zero-variance", False
    ),
    "learning rate too small to move a ratio": (
        Run(reward=line(0.3, 0.3), metrics={"lr": 1e-7, **STALE, **STILL}), "hardly-moves", False
    ),
    "collapses, by held-out prompts": (
        Run(reward=peak(0.2, 0.8, 0.02), held_out={0: 0.2, 30: 0.8, 60: 0.02}), "collapsed", False
    ),
    "collapses, no evaluation": (Run(reward=peak(0.2, 0.8, 0.02)), "collapsed", False),
    "falls": (Run(reward=line(0.6, 0.2), held_out={0: 0.6, 60: 0.2}), "fell", False),
    "a reward raises in the first evaluation": (
        Run(state="failed", error=f"4 of 4 rollouts of the evaluation failed; the first, eval-v0-0: {RAISES}",
            failed_evaluations={0: f"4 of 4 rollouts of the evaluation failed; the first, eval-v0-0: {RAISES}"},
            config=WITH_EVALUATION),
        "reward-fails", False,
    ),
    "learns until a server dies": (
        Run(reward=line(0.2, 0.7), state="failed", error="the server ended with status 1\nits log"), "learns", True
    ),
    "four steps": (Run(reward=line(0.2, 0.25), num_steps=4), "too-early", None),
    "eight noisy steps": (Run(reward=line(0.45, 0.5), num_steps=8), "unclear", None),
    "flat, no evaluation set": (Run(reward=line(0.3, 0.3)), "flat", False),
    "flat, 200 prompts": (Run(reward=line(0.3, 0.3), held_out={0: 0.3, 60: 0.3}, num_prompts=200, samples=4), "flat", False),
    "only the sampled reward rises": (
        Run(reward=line(0.2, 0.8), held_out={0: 0.3, 60: 0.3}, num_prompts=200), "unconfirmed", None
    ),
    "certain, but little": (
        Run(reward=line(0.5, 0.512), num_steps=200, held_out={0: 0.5, 200: 0.512}, num_prompts=4000, samples=16), "little", None
    ),
    "no reward": (Run(reward=line(0.5, 0.5), metrics={"reward": math.nan, "reward_min": math.nan, "reward_max": math.nan}),
                  "unscored", False),
    "before its first step": (Run(state="running", held_out={0: 0.3}), "no-steps", None),
    "ended before its first step": (Run(state="failed", error="the server ended with status 1"), "no-steps", None),
}  # fmt: skip


def _diagnosed(name: str, folder: Path, seed: int = 0) -> Diagnosis:
    return diagnose(RunHistory.read(RUNS[name][0].write(folder, seed)))


SAID = {
    "all rewards 0": "all rewards are 0", "a reward raises in the first evaluation": RAISES,
    "before its first step": "no optimizer step has finished yet",
    "learns, the last evaluation failed": "the evaluation of step 60 failed: a server is gone",
    "learns until a server dies": "Then the run failed: The server ended with status 1.",
    "ended before its first step": "The server ended with status 1",
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_labeled_run_is_diagnosed_by_its_label_by_how_much_and_with_the_remedy(tmp_path: Path, name: str) -> None:
    run, key, is_learning = RUNS[name]
    found = _diagnosed(name, tmp_path)
    assert (found.key, found.is_learning) == (key, is_learning), found.lines
    assert SAID.get(name, "") in " ".join(found.lines)
    assert found.fix or is_learning is not False, "whoever does not learn is told what to do"
    numbers = found.numbers
    if key in ("learns", "little", "baseline", "unconfirmed"):  # by how much, and how certain
        assert numbers["low"] < numbers["change"] < numbers["high"]
        assert f"{numbers['change']:+.3f}" in found.text
        assert f"{numbers['low']:+.3f} to {numbers['high']:+.3f}" in found.text
    if run.baseline is not None:
        assert numbers["baseline"] == run.baseline
        assert f"{run.baseline:g}" in found.text


def test_what_of_a_run_cannot_be_read_is_said_beside_what_follows_from_the_rest(tmp_path: Path) -> None:
    _diagnosed("learns", tmp_path)
    run_dir = RunDir(tmp_path / "run")
    with run_dir.metrics.open("a") as file:
        file.write("no JSON\n")
    (problem,) = read_status(run_dir).as_json()["problems"]
    assert "metrics.jsonl" in problem
    with pytest.warns(UserWarning, match="metrics.jsonl"):
        assert api.Run(run_dir.root).diagnosis().key == "learns"


def test_the_lines_of_a_step_that_ran_again_replace_those_of_the_attempt_before(tmp_path: Path) -> None:
    lines = [{"step": 1, "reward": 0.1}, {"step": 2, "reward": 0.2, "kl": 1}, {"step": 3}, {"step": 2, "reward": 0.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 3, "rew')
    rows = RunHistory.read(RunDir(tmp_path)).metrics
    assert [dict(row) for row in rows] == [{"step": 1.0, "reward": 0.1}, {"step": 2.0, "reward": 0.5}]


def test_the_interval_holds_the_true_change_in_nineteen_runs_of_twenty() -> None:
    """Prompts of one difficulty in both evaluations, so pairs tell more than the two standard errors: 0.4 -> 0.5."""
    held, narrower = 0, 0
    for seed in range(200):
        dice = random.Random(seed)
        hard = [dice.random() for _ in range(100)]
        before, after = ([float(dice.random() < 0.8 * p + gain) for p in hard] for gain in (0.0, 0.1))
        summed = []
        for mean in (sum(before) / 100, sum(after) / 100):
            stderr = math.sqrt(mean * (1 - mean) / 99)
            summed.append({"reward": mean, "reward_stderr": stderr, "num_prompts": 100.0})
        paired = held_out_change(*summed, before, after, scale=1.0)
        alone = held_out_change(*summed, [], [], scale=1.0)
        held += paired.low <= 0.1 <= paired.high
        narrower += paired.high - paired.low < alone.high - alone.low
    assert 184 <= held <= 199
    assert narrower > 150


# rewards of a run of the quickstart, by step: the task is solved after a quarter of them
SOLVED = [
    0.17, 0.16, 0.42, 0.34, 0.42, 0.48, 0.55, 0.69, 0.72, 0.71, 0.84, 0.94, 0.88, 0.86, 0.92, 0.94, 0.91, 0.93, 0.93, 0.94, 0.84,
    0.97, 0.98, 0.93, 0.9, 0.86, 0.95, 0.91, 0.88, 0.91, 0.95, 0.94, 0.95, 0.98, 0.91, 0.91, 0.9, 0.93, 0.95, 0.94, 0.95, 0.95,
    0.9, 0.91, 0.98, 0.88, 0.89, 0.88, 0.93, 0.95,
]  # fmt: skip


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_rise_that_is_over_early_stays_one_and_so_does_a_fall(sign: float) -> None:
    for count in range(10, len(SOLVED) + 1):
        found = trend([sign * reward for reward in SOLVED[:count]])
        assert found is not None
        assert found.has_risen if sign > 0.0 else found.has_fallen, (count, str(found))


@pytest.mark.parametrize("count", [6, 10, 20, 50])
@pytest.mark.parametrize("correlation", [0.0, 0.5])
def test_chance_alone_is_seldom_called_a_trend_also_where_steps_are_alike(correlation: float, count: int) -> None:
    risen = fallen = found_rise = 0
    for seed in range(600):
        dice = random.Random(seed)
        value, values = dice.gauss(0.0, 1.0), []
        for _ in range(count):
            values.append(value)
            value = correlation * value + math.sqrt(1.0 - correlation**2) * dice.gauss(0.0, 1.0)
        found, rise = trend(values), trend([noise + 4.0 * step / count for step, noise in enumerate(values)])
        assert found is not None
        assert rise is not None
        risen, fallen, found_rise = risen + found.has_risen, fallen + found.has_fallen, found_rise + rise.has_risen
    assert max(risen, fallen) <= 27  # 2.5 % of 600, and three standard errors: 15 + 3 x 3.8
    assert found_rise >= {6: 0.15, 10: 0.3, 20: 0.45, 50: 0.85}[count] * 600
