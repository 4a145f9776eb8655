"""Is it learning? A labeled set of runs, as the files that they leave; each with the numbers that it was made from."""

from __future__ import annotations

import io
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from grpo_async import api
from grpo_async.display.status import print_status, read_status
from grpo_async.findings import Evidence, Verdict, find, judge
from grpo_async.findings.statistics import held_out_change, trend
from grpo_async.launcher.advisor import Advisor
from grpo_async.records import RolloutGroup, ScoredGroup
from grpo_async.rewards.call import RewardError
from grpo_async.rollout.worker import why_no_signal
from grpo_async.run_directory import RunDir
from grpo_async.viewer.web.report import write_report
from tests.support.records import make_completion, make_prompt
from tests.viewer.support import answers_by_view

ROLLOUTS = 64  # of a step
# a launcher that has just written, however late the test comes
ELSEWHERE = {"host": "another", "updated_at": time.time() + 86_400.0}


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run was like: `reward` and `held_out` are the true chances of a reward of `high` (else `low`) by step."""

    reward: Callable[[float], float] | None = None  # of the share of the run that is done
    num_steps: int = 60
    low: float = 0.0
    high: float = 1.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    held_out: Mapping[int, float] = field(default_factory=dict)  # step -> chance
    num_prompts: int = 100
    samples: int = 2
    loses_prompts: bool = False  # one with every step
    baseline: float | None = None
    failed_evaluations: Mapping[int, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    state: str = "finished"
    error: str | None = None

    def write(self, folder: Path, seed: int) -> RunDir:
        dice, run_dir = random.Random(seed), RunDir(folder / "run")
        run_dir.create()
        run_dir.config.write_text(json.dumps({"training": {"max_steps": self.num_steps}, **self.config}))
        run_dir.status.write_text(json.dumps({"version": 1, "state": self.state, "error": self.error, **ELSEWHERE}))
        lines = [self._step(step, dice) for step in range(1, self.num_steps + 1)] if self.reward is not None else []
        run_dir.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        hard = [dice.gauss(0.0, 1.5) for _ in range(self.num_prompts)]  # some prompts are harder, in every evaluation
        told = [
            self._evaluation(step, chance, hard[step if self.loses_prompts else 0 :], dice)
            for step, chance in self.held_out.items()
        ]
        told += [{"step": step, "when": "during", "error": error} for step, error in self.failed_evaluations.items()]
        run_dir.evaluation_log.write_text("".join(json.dumps(line) + "\n" for line in told))
        return run_dir

    def _step(self, step: int, dice: random.Random) -> dict[str, float]:
        assert self.reward is not None
        chance = self.reward((step - 1) / max(1, self.num_steps - 1))
        hits = [self.high if dice.random() < chance else self.low for _ in range(ROLLOUTS)]
        return {
            "step": step, "lr": 1e-5, "grad_norm": 0.5, "reward": math.fsum(hits) / ROLLOUTS, "reward_min": min(hits),
            "reward_max": max(hits), "frac_reward_zero_std": 0.2, **self.metrics,
        }  # fmt: skip

    def _evaluation(self, step: int, chance: float, hard: Sequence[float], dice: random.Random) -> dict[str, Any]:
        logit = math.log(chance / (1 - chance)) * 1.4  # the mean over prompts is about `chance`
        chances = [1 / (1 + math.exp(-logit - each)) for each in hard]
        span = self.high - self.low
        means = [self.low + span * sum(dice.random() < p for _ in range(self.samples)) / self.samples for p in chances]
        mean = math.fsum(means) / len(means)
        spread = math.sqrt(sum((each - mean) ** 2 for each in means) / (len(means) - 1))
        metrics = {"num_prompts": len(means), "reward": mean, "reward_stderr": spread / math.sqrt(len(means))}
        metrics |= {} if self.baseline is None else {"majority_baseline": self.baseline}
        return {"step": step, "when": "during", "metrics": metrics, "by_group": {}, "prompt_rewards": means}


def line(first: float, last: float) -> Callable[[float], float]:
    return lambda done: first + (last - first) * done


def peak(first: float, best: float, last: float) -> Callable[[float], float]:
    return lambda done: first + (best - first) * 2 * done if done < 0.5 else best + (last - best) * (2 * done - 1)


def _nothing_to_learn(reward: float) -> str:
    """As a run ends in which every group has the same rewards."""
    group = RolloutGroup(prompt=make_prompt(1), completions=[make_completion("a"), make_completion("b")])
    scored = ScoredGroup(group=group, samples=[], rewards=[reward, reward], reward_parts=[{}, {}])
    return f"80 consecutive groups had nothing to learn from; the last one: {why_no_signal(scored)}. Look at `inspect-rollouts`"


RAISES = str(RewardError("exact_answer", "raised KeyError: 'answer' (rewards.py:12)"))
WITH_EVALUATION = {"evaluation": {"data": {"type": "jsonl"}}}
STALE = {"async/staleness_mean": 1.0}
STILL = {"sampling/importance_sampling_ratio/min": 0.9999, "sampling/importance_sampling_ratio/max": 1.0001}

RUNS: dict[str, tuple[Run, str, bool | None]] = {
    "learns": (Run(reward=line(0.2, 0.9), held_out={0: 0.2, 30: 0.5, 60: 0.85}, baseline=0.12), "learns", True),
    "learns slowly": (
        Run(reward=line(0.3, 0.45), num_steps=200, held_out={0: 0.3, 200: 0.42}, num_prompts=500), "learns", True
    ),
    "learns at once and stays": (Run(reward=lambda done: 0.85 if done > 0.1 else 0.3, num_steps=100), "learns", True),
    "learns from -1 to 1": (Run(reward=line(0.2, 0.8), low=-1.0, held_out={0: 0.2, 60: 0.8}), "learns", True),
    "learns, fewer prompts at the end": (
        Run(reward=line(0.2, 0.8), held_out={0: 0.2, 60: 0.8}, loses_prompts=True), "learns", True
    ),
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
    "beyond the most frequent answer": (
        Run(reward=line(0.02, 0.5), held_out={0: 0.02, 60: 0.5}, num_prompts=200, baseline=0.2), "learns", True
    ),
    "all rewards 0": (Run(state="failed", error=_nothing_to_learn(0.0)), "zero-variance", False),
    "all rewards 1": (Run(state="failed", error=_nothing_to_learn(1.0)), "zero-variance", False),
    "all rewards 1, trained all the same": (
        Run(reward=line(1.0, 1.0), metrics={"frac_reward_zero_std": 1.0, "reward": 1.0, "reward_min": 1.0, "grad_norm": 0.1}),
        "zero-variance", False,
    ),
    "all rewards 0, trained all the same": (
        Run(reward=line(0.0, 0.0), metrics={"frac_reward_zero_std": 1.0}), "zero-variance", False
    ),
    "almost no group differs": (
        Run(reward=line(0.01, 0.01), metrics={"frac_reward_zero_std": 0.95}), "zero-variance", False
    ),
    "truncated": (
        Run(reward=line(0.0, 0.0), metrics={"completions/clipped_ratio": 0.98, "frac_reward_zero_std": 1.0},
            config={"rollout": {"max_completion_tokens": 16}}),
        "truncated", False,
    ),
    "learning rate 1e-9, synchronous": (
        Run(reward=line(0.3, 0.3), metrics={"lr": 1e-9}, held_out={0: 0.3, 60: 0.3}), "hardly-moves", False
    ),
    "learning rate too small to move a ratio": (
        Run(reward=line(0.3, 0.3), metrics={"lr": 1e-7, **STALE, **STILL}), "hardly-moves", False
    ),
    "learning rate 0": (Run(reward=line(0.3, 0.3), metrics={"lr": 0.0}), "no-gradient", False),
    "collapses, by held-out prompts": (
        Run(reward=peak(0.2, 0.8, 0.02), held_out={0: 0.2, 30: 0.8, 60: 0.02}), "collapsed", False
    ),
    "collapses, no evaluation": (Run(reward=peak(0.2, 0.8, 0.02)), "collapsed", False),
    "collapses until all rewards are equal": (
        Run(reward=peak(0.2, 0.8, 0.02), metrics={"frac_reward_zero_std": 0.95}), "collapsed", False
    ),
    "falls": (Run(reward=line(0.6, 0.2), held_out={0: 0.6, 60: 0.2}), "fell", False),
    "a reward raises, no evaluation": (
        Run(state="failed", error=f"16 failures in a row and no group succeeded; the last one: {RAISES}"), "reward-fails", False
    ),
    "a reward raises in the first evaluation": (
        Run(state="failed", error=f"4 of 4 rollouts of the evaluation failed; the first, eval-v0-0: {RAISES}",
            failed_evaluations={0: f"4 of 4 rollouts of the evaluation failed; the first, eval-v0-0: {RAISES}"},
            config=WITH_EVALUATION),
        "reward-fails", False,
    ),
    "learns until a reward raises": (
        Run(reward=line(0.2, 0.7), state="failed", error=f"16 failures in a row; the last one: {RAISES}"), "learns", True
    ),
    "one step": (Run(reward=line(0.2, 0.25), num_steps=1), "too-early", None),
    "four steps": (Run(reward=line(0.2, 0.25), num_steps=4), "too-early", None),
    "eight noisy steps": (Run(reward=line(0.45, 0.5), num_steps=8), "unclear", None),
    "flat, no evaluation set": (Run(reward=line(0.3, 0.3)), "flat", False),
    "flat, 200 prompts": (Run(reward=line(0.3, 0.3), held_out={0: 0.3, 60: 0.3}, num_prompts=200, samples=4), "flat", False),
    "flat, the evaluation failed": (
        Run(reward=line(0.3, 0.3), failed_evaluations={0: "a server is gone"}, config=WITH_EVALUATION), "flat", False
    ),
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


def _judged(name: str, folder: Path, seed: int = 0) -> tuple[Evidence, Verdict]:
    evidence = Evidence.read(RUNS[name][0].write(folder, seed))
    return evidence, judge(evidence)


SAID = {
    "all rewards 0": "All rewards are 0", "all rewards 0, trained all the same": "the function does not recognize right answers",
    "all rewards 1": "All rewards are 1", "learning rate 1e-9, synchronous": "optimizer.lr",
    "all rewards 1, trained all the same": "All rewards are 1", "a reward raises, no evaluation": RAISES,
    "a reward raises in the first evaluation": RAISES, "truncated": "rollout.max_completion_tokens is 16",
    "before its first step": "No optimizer step has finished yet", "learns, the last evaluation failed": "The evaluation failed",
    "ended before its first step": "the server ended with status 1", "one step": "Only 1 step had a reward.",
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_labeled_run_is_judged_by_its_label_by_how_much_and_with_the_cause(tmp_path: Path, name: str) -> None:
    run, key, is_learning = RUNS[name]
    evidence, verdict = _judged(name, tmp_path)
    assert (verdict.key, verdict.is_learning) == (key, is_learning), verdict.text
    assert SAID.get(name, "") in verdict.text
    if "low" in verdict.numbers:  # by how much, and how certain
        numbers = verdict.numbers
        assert numbers["low"] < numbers["change"] < numbers["high"]
        assert f"{numbers['change']:+.3f}" in verdict.text
        assert f"{numbers['low']:+.3f} to {numbers['high']:+.3f}" in verdict.text
    if run.baseline is not None:
        assert verdict.numbers["baseline"] == run.baseline
        assert f"{run.baseline:g}" in verdict.text
    if run.config.get("evaluation"):
        assert "no-evaluation" not in {finding.key for finding in find(evidence)}, "one was set"


def test_what_of_a_run_cannot_be_read_is_said_beside_what_follows_from_the_rest(tmp_path: Path) -> None:
    _judged("learns", tmp_path)
    run_dir = RunDir(tmp_path / "run")
    with run_dir.metrics.open("a") as file:
        file.write("no JSON\n")
    status = read_status(run_dir)
    (problem,) = status.as_json()["problems"]
    assert "metrics.jsonl" in problem
    console = Console(file=io.StringIO(), width=200)
    print_status(console, status)
    assert problem in console.file.getvalue()  # type: ignore[attr-defined]
    with pytest.warns(UserWarning, match="metrics.jsonl"):
        api.Run(run_dir.root).verdict()


@pytest.mark.parametrize("name", ["learns", "all rewards 1"])
def test_status_report_and_advisor_give_the_same_verdict(tmp_path: Path, name: str) -> None:
    """The summary's is that of the evidence: tests/e2e/test_inspector.py."""
    _, verdict = _judged(name, tmp_path)
    run_dir = RunDir(tmp_path / "run")
    assert read_status(run_dir).as_json()["learning"] == verdict.as_dict()
    shown = answers_by_view(write_report([run_dir]))["run"]["verdict"]
    assert shown["key"] == verdict.key
    assert verdict.text in shown["text"]
    told: list[Verdict] = []
    advisor = Advisor(Mock(learning=told.append), setup=Mock(), every_steps=0, run_dir=run_dir)
    advisor.show("evaluation", {})
    assert told == [verdict]


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


def test_the_line_through_the_steps_does_not_leave_the_rewards() -> None:
    found = trend([0.0, 0.3, 0.6, 0.9, 1.0, 1.0, 1.0])  # over the logarithm the line goes from -0.014 to 1.104
    assert found is not None
    assert (found.first, found.last) == (0.0, 1.0)


def test_an_interval_ends_where_the_rewards_do() -> None:
    found = held_out_change({"reward": 0.0}, {"reward": 0.9}, [0.0] * 10, [0.0] + [1.0] * 9, scale=1.0)
    assert found.value == pytest.approx(0.9)
    assert (found.has_risen, found.high) == (True, 1.0)  # 0.9 + 2.3 x 0.1 would be more than any change
    large = held_out_change({"reward": 1.0, "reward_stderr": 5.0}, {"reward": 51.0}, [], [], scale=1.0)  # not its range
    assert large.high >= large.value == 50.0


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
