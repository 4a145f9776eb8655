"""What a run suffers from and what to change: each rule with numbers worked by hand."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from grpo_async.config.keys import keys_at
from grpo_async.findings import Finding, RunHistory, Severity, find
from grpo_async.store.query import parse_query
from grpo_async.viewer.web.plots import CHAPTERS
from tests.viewer.support import steps, wiggle

ERROR, WARNING, NOTE = Severity
RATIO = "sampling__importance_sampling_ratio"
BUSY = {"step_time": 10.0, "pipeline__trainer_idle_ratio": 0.05, "pipeline__generator_idle_ratio": 0.05,
        "rollout__duration_s": 1.0}  # fmt: skip
WAITS = {"pipeline__trainer_idle_ratio": 0.41}
TURNS = {"pipeline__trainer_idle_ratio": 0.6, "pipeline__generator_idle_ratio": 0.4}
JUDGE = {"rewards": [{"function": "rewards:judge"}]}


def _names_settings(finding: Finding) -> None:
    for name in re.findall(r"\b[a-z_]+(?:\.[a-z_0-9]+)+\b", f"{finding.title} {finding.text} {finding.fix}"):
        if not name.endswith((".log", ".json")):
            assert keys_at(tuple(name.split("."))), name


# what differs from BUSY, settings of rollout, the rule, words of its sentences
SPEED: list[tuple[dict[str, float], dict[str, Any], str, str]] = [
    ({}, {}, "", ""),
    ({**WAITS, "scoring__duration_s": 4.0}, {}, "scoring", "rewards:judge takes 4 s a group, generating it 1 s"),
    ({"scoring__duration_s": 4.0}, {}, "", ""),  # nobody waits for it
    ({**WAITS, "tools__duration_s__per_rollout": 0.6}, {}, "slow-tools", "Tools take 60% of a rollout's time."),
    # 1 s - 2 turns x 0.1 s
    ({**WAITS, "rollout__generation_duration_s": 0.1, "rollout__num_turns": 2.0}, {"agent": {"function": "a:b"}},
     "slow-tools", "The agent's own work takes 80%"),
    # 4 s of training, 6 s of generation
    (TURNS, {"max_staleness": 0}, "taking-turns", "a step of 10 s could take 6 s. Raise rollout.max_staleness from 0 to 1."),
    (TURNS, {"max_staleness": 4}, "", ""),
]  # fmt: skip


@pytest.mark.parametrize(("metrics", "rollout", "key", "words"), SPEED)
def test_what_wastes_time_names_what_to_do_and_settings_that_exist(
    metrics: dict[str, float], rollout: dict[str, Any], key: str, words: str
) -> None:
    config = {**JUDGE, "rollout": {"max_staleness": 1, **rollout}}
    found = find(RunHistory(metrics=steps(20, **{**BUSY, **metrics}), config=config))
    assert [each.key for each in found] == ([key] if key else [])
    for each in found:
        assert words in f"{each.title}. {each.fix}"
        _names_settings(each)


def test_dropped_groups_are_counted_over_the_last_steps() -> None:
    rows = [
        {**row, "ledger/groups/trained": 10.0 * step, "ledger/groups/stale": 2.0 * max(0, step - 5)}
        for step, row in enumerate(steps(20, **BUSY))
    ]
    (found,) = find(RunHistory(metrics=rows, config={"rollout": {"max_staleness": 1}}))
    assert found.title.startswith("17% of the groups are dropped")  # 2 of 12
    assert found.fix == "Raise rollout.max_staleness from 1 to 2."


def test_few_steps_and_missing_metrics_say_nothing_about_speed() -> None:
    config = {"rollout": {"max_staleness": 1}}
    for rows in (
        [],
        steps(2, pipeline__trainer_idle_ratio=0.5),
        steps(9, **BUSY | TURNS),
        [{"step": float(step)} for step in range(30)],
    ):
        assert [each for each in find(RunHistory(metrics=rows, config=config)) if each.plot == "idle"] == []


# -- what else is found


def _flat(num: int = 20, *, from_step: int = 1, **changes: float) -> list[dict[str, float]]:
    """No trend in the reward; `changes` hold from a step on."""
    rows = [*steps(from_step - 1), *steps(num, **changes)[from_step - 1 :]]
    return [{**row, "step": float(step), "reward": 0.2 + wiggle(step)} for step, row in enumerate(rows, start=1)]


CUT_OFF = _flat(sampling__sampling_logp_difference__mean=0.2, **{f"{RATIO}__mean": 0.8})
LATER = [{**row, "sampling/sampling_logp_difference/mean": 0.2 if row["step"] < 6 else 0.7} for row in CUT_OFF]
TOP_P = {"rollout": {"top_p": 0.8}}
FOUND: list[tuple[str, Severity | None, str, Sequence[Mapping[str, float]], Mapping[str, Any]]] = [
    ("zero-variance", NOTE, "Most groups are solved", steps(30, first=0.2, last=1.0, frac_reward_zero_std=0.8), {}),
    ("zero-variance", ERROR, "All rewards are", steps(10, reward_min=1e9, reward_max=1e9 + 1e-4), {}),  # but for noise
    # the server's from the first step on, or it came with training
    ("off-policy", ERROR, "It was so in the first step", _flat(sampling__sampling_logp_difference__mean=0.5), {}),
    ("off-policy", WARNING, "ratio is 1.2. It developed", _flat(from_step=6, **{f"{RATIO}__mean": 1.2}), {}),
    ("off-policy", None, "", CUT_OFF, TOP_P),  # the first step shows what top_p cuts off
    ("off-policy", ERROR, "differ by 0.5 nats", LATER, TOP_P),
    ("recomputed", NOTE, "6% of the tokens", _flat(sync__recomputed_ratio=0.06), {}),
    ("entropy", WARNING, "The entropy collapsed", _flat(from_step=9, entropy=0.01), {}),
    ("entropy", WARNING, "The entropy exploded", _flat(from_step=11, entropy=4.0), {}),
    ("entropy", None, "", [{**row, "entropy": 0.01} if row["step"] > 8 else row for row in steps(20)], {}),
    ("tools", WARNING, "30% of the turns have tool calls that cannot be read",
     _flat(tools__call_frequency=1.0, tools__parse_error_frequency=0.3), {}),
    ("tools", WARNING, "70% of the tool calls fail", _flat(tools__call_frequency=1.0, tools__failure_frequency=0.7), {}),
    ("tools", ERROR, "hardly ever called", _flat(tools__call_frequency=0.0), {}),
    ("failed-groups", ERROR, "60% of the groups failed Most often: rollout/ReadTimeout, 7 times.",
     _flat(ledger__groups__failed=60.0, failures__rollout__ReadTimeout=7.0), {}),
    ("no-gradient", ERROR, "The gradient is 0", _flat(grad_norm=0.0), {}),
    ("no-change", ERROR, "The pushed weights do not change", _flat(from_step=18, sync__changed=0.0), {}),
    ("delivery", WARNING, "other weights than the trainer's on a server, 2 times", _flat(from_step=19, sync__wrong=1.0), {}),
    # samples of the policy itself have a ratio of 1 whatever the step is
    ("hardly-moves", None, "",
     _flat(**{f"{RATIO}__min": 0.9999, f"{RATIO}__max": 1.0001}, lr=1e-6, async__staleness_mean=0.0), {}),
]  # fmt: skip


@pytest.mark.parametrize(("key", "severity", "words", "metrics", "config"), FOUND)
def test_what_is_found_and_how_bad_it_is(
    key: str, severity: Severity | None, words: str, metrics: list[dict[str, float]], config: dict[str, Any]
) -> None:
    findings = find(RunHistory(metrics=metrics, config=config))
    found = {finding.key: finding for finding in findings}.get(key)
    assert (found and found.severity) == severity
    assert found is None or words in f"{found.title} {found.text}"
    plots = {plot.name for chapter in CHAPTERS.values() for plot in chapter}
    for finding in findings:
        parse_query(finding.query or "")
        assert finding.plot is None or finding.plot in plots
        _names_settings(finding)
    ranks = [list(Severity).index(each.severity) for each in findings]
    assert ranks == sorted(ranks)


def test_a_run_that_does_well_has_no_findings() -> None:
    assert find(RunHistory(metrics=steps(20))) == []
