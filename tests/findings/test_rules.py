"""What the metrics of a run say about its learning."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from grpo_async.findings import Evidence, Finding, Severity, find
from grpo_async.findings.rules import RULES
from grpo_async.store.query import parse_query
from grpo_async.tracking.evaluation_record import EvaluationRecord
from grpo_async.viewer.web.layout import CHAPTERS
from tests.viewer.support import steps, wiggle

ERROR, WARNING, GOOD, NOTE = Severity
RATIO = "sampling__importance_sampling_ratio"


def _found(evidence: Evidence) -> dict[str, Finding]:
    return {finding.key: finding for finding in find(evidence)}


def _evaluations(*rewards: float, stderr: float = 0.02) -> list[EvaluationRecord]:
    return [
        EvaluationRecord(step=10 * place, metrics={"reward": reward, "reward_stderr": stderr})
        for place, reward in enumerate(rewards)
    ]


def _flat(num: int = 20, *, from_step: int = 1, **changes: float) -> list[dict[str, float]]:
    """No trend in the reward; `changes` hold from a step on."""
    changed = steps(num, **changes)
    rows = [*steps(from_step - 1), *changed[from_step - 1 :]]
    return [{**row, "step": float(step), "reward": 0.2 + wiggle(step)} for step, row in enumerate(rows, start=1)]


def _without(name: str, rows: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    return [{key: value for key, value in row.items() if key != name} for row in rows]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A run, and the finding that it must give: `what` is its title or a part of its text."""

    key: str
    severity: Severity | None  # None: it must not be found
    what: Sequence[str] = ()
    metrics: Sequence[dict[str, float]] = field(default_factory=_flat)
    query: str | None = None
    more: dict[str, Any] = field(default_factory=dict)  # of Evidence


RISES, RISES_HELD_OUT = steps(20), {"evaluations": _evaluations(0.2, 0.8, 0.7, stderr=0.01)}
# training changes by about 0.13; chance: 2 x sqrt(0.048^2 + 0.048^2) = 0.136, above the change of 0.12
RISES_A_LITTLE = [{**row, "reward": 0.3 + 0.15 * i / 19 + 0.02 * (-1) ** i} for i, row in enumerate(steps(20))]
STILL = {f"{RATIO}__min": 0.9999, f"{RATIO}__max": 1.0001}
DIFFERENCE = "sampling/sampling_logp_difference/mean"
CUT_OFF = _flat(sampling__sampling_logp_difference__mean=0.2, **{f"{RATIO}__mean": 0.8})
CASES = [
    Case(key="reward-trend", severity=NOTE, metrics=steps(5)),  # too few steps
    Case(key="reward-trend", severity=WARNING, what=["The reward was at its maximum from the first step on"],
         metrics=steps(20, first=1.0, last=1.0, reward_min=0.5)),
    Case(key="reward-trend", severity=WARNING, what=["The reward is flat"],  # far below the best, in rewards of up to 0.02
         metrics=steps(20, first=0.001, last=0.001, reward_min=0.0, reward_max=0.02)),
    Case(key="zero-variance", severity=NOTE, what=["Most groups are solved by now"],
         metrics=steps(30, first=0.2, last=1.0, frac_reward_zero_std=0.8)),
    Case(key="zero-variance", severity=ERROR, what=["rewards are all equal"],
         metrics=steps(10, reward_min=1e9, reward_max=1e9 + 1e-4)),  # as has_zero_variance has it: noise relative to the size
    Case(key="unscored", severity=ERROR, what=["100% of the rollouts (8 of 8)"], query="unscored",
         metrics=_without("reward", steps(10)), more={"num_sampled": 8, "num_unscored": 8}),
    # an error of user code that only reads like ours
    *(Case(key="no-steps", severity=ERROR, what=[f"{error}."], metrics=[], more={"status": "failed", "error": error})
      for error in ("all rewards are wonderful, said the judge", "all rewards are 100%: the judge is happy")),
    # held-out prompts
    Case(key="held-out", severity=WARNING, what=["the held-out reward did not follow", "reward hacking"],
         metrics=RISES, more={"evaluations": _evaluations(0.4, 0.41, 0.4)}, query=""),
    Case(key="held-out", severity=NOTE, what=["It is not clear whether the held-out reward rose", "evaluation.num_prompts"],
         metrics=RISES_A_LITTLE, more={"evaluations": _evaluations(0.3, 0.42, stderr=0.048)}),
    Case(key="held-out", severity=WARNING, what=["the held-out reward did not follow", "reward hacking"],
         metrics=RISES, more={"evaluations": _evaluations(0.3, 0.35, stderr=0.048)}),
    *(Case(key="held-out", severity=ERROR, metrics=metrics, more={"evaluations": _evaluations(0.6, 0.4, 0.3)})
      for metrics in (RISES, _flat())),
    Case(key="held-out-peaked", severity=None, more={"evaluations": _evaluations(0.6, 0.4, 0.3)}),  # best before training
    Case(key="held-out-peaked", severity=WARNING, what=["The held-out reward was better earlier", "0.7 at step 10"],
         more={"evaluations": _evaluations(0.2, 0.7, 0.2)}),
    Case(key="held-out-peaked", severity=WARNING, metrics=RISES, more=RISES_HELD_OUT),
    Case(key="no-evaluation", severity=NOTE, metrics=RISES),
    # off policy: the server's from the first step on, or it came with training; a ratio of 0.5 is as far as 2
    Case(key="off-policy", severity=ERROR, what=["0.5 nats", "already so in the first step"],
         metrics=_flat(sampling__sampling_logp_difference__mean=0.5)),
    Case(key="off-policy", severity=WARNING, what=["importance ratio is 1.2 times", "It developed during training"],
         metrics=_flat(from_step=6, **{f"{RATIO}__mean": 1.2})),
    Case(key="off-policy", severity=ERROR, metrics=_flat(**{f"{RATIO}__mean": 0.5})),
    # with rollout.top_p the first step shows what it cuts off
    Case(key="off-policy", severity=None, metrics=CUT_OFF, more={"config": {"rollout": {"top_p": 0.8}}}),
    Case(key="off-policy", severity=ERROR, what=["0.5 nats on average", "It developed during training"],
         metrics=[{**row, DIFFERENCE: 0.2 if row["step"] < 6 else 0.7} for row in CUT_OFF],
         more={"config": {"rollout": {"top_p": 0.8}}}),
    Case(key="entropy", severity=WARNING, what=["The entropy collapsed"], metrics=_flat(from_step=9, entropy=0.01)),
    Case(key="entropy", severity=NOTE, metrics=[*RISES[:8], *({**row, "entropy": 0.01} for row in RISES[8:])]),
    Case(key="entropy", severity=WARNING, what=["The entropy exploded"], metrics=_flat(from_step=11, entropy=4.0)),
    *(Case(key="tools", severity=WARNING, what=[what], metrics=_flat(**{f"tools__{name}_frequency": value}))
      for name, value, what in (("parse_error", 0.3, "Tool calls cannot be read"), ("failure", 0.7, "Most tool calls fail"),
                                ("call", 0.0, "The tools are hardly ever called"))),
    Case(key="failed-groups", severity=ERROR, what=["60% of the groups failed", "7 times: ReadTimeout."],
         metrics=_flat(ledger__groups__failed=60.0), more={"errors": [("ReadTimeout", 7)]}),
    Case(key="failed-groups", severity=ERROR, what=["failure, 1 time: ReadTimeout."],
         metrics=_flat(ledger__groups__failed=60.0), more={"errors": [("ReadTimeout", 1)]}),
    Case(key="no-gradient", severity=ERROR, what=["The gradient is 0"], metrics=_flat(grad_norm=0.0)),
    # samples of the policy itself have a ratio of 1 whatever the step is
    Case(key="hardly-moves", severity=None, metrics=_flat(**STILL, lr=1e-6, async__staleness_mean=0.0)),
    Case(key="bad-updates", severity=WARNING, what=["skipped: 20 updates."], metrics=_flat(training__skipped_updates=1.0)),
    Case(key="bad-updates", severity=WARNING, what=["skipped: 1 update."],
         metrics=_flat(from_step=20, training__skipped_updates=1.0)),
    Case(key="clipped", severity=WARNING, metrics=_flat(clip_ratio__region_mean=0.4)),
    Case(key="masked", severity=ERROR, what=["loss.off_policy_mask leaves 95%"], metrics=_flat(masked__off_policy=0.95)),
    Case(key="kl", severity=WARNING, metrics=_flat(kl=8.0)),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.key)
def test_what_is_found_and_how_bad_it_is(case: Case) -> None:
    finding = _found(Evidence(metrics=case.metrics, **case.more)).get(case.key)
    assert (finding and finding.severity) == case.severity
    if finding is not None:
        for text in case.what:
            assert text in f"{finding.title} {finding.text} {finding.fix}"
        assert case.query is None or finding.query == case.query


def test_a_run_that_learns_is_called_so() -> None:
    found = find(Evidence(metrics=steps(20), evaluations=_evaluations(0.2, 0.5, 0.8)))
    assert {finding.key: finding.severity for finding in found} == {"reward-trend": GOOD, "held-out": GOOD}
    numbers = {finding.key: finding.numbers for finding in found}
    assert numbers["reward-trend"]["change"] == pytest.approx(0.6, abs=0.03)
    # 2 standard errors of 0.0283 each way
    assert numbers["held-out"]["low"] == pytest.approx(0.6 - 1.97 * 0.0283, abs=1e-2)


def test_every_rule_survives_missing_metrics() -> None:
    for metrics in ([], [{"step": 1.0}], [{"step": float(step)} for step in range(30)]):
        for rule in RULES:
            rule(Evidence(metrics=metrics))


def test_the_worst_comes_first_and_every_query_can_be_read_and_every_plot_exists() -> None:
    plots = {plot.name for chapter in CHAPTERS for plot in chapter.plots} | {"held-out"}
    bad = _flat(
        completions__clipped_ratio=0.95,
        kl=9.0,
        clip_ratio__region_mean=0.4,
        ledger__groups__stale=30.0,
        sampling__ess=0.1,
    )
    keys = set()
    for evidence in (Evidence(metrics=bad), *(Evidence(metrics=case.metrics, **case.more) for case in CASES)):
        found = find(evidence)
        assert [finding.severity.rank for finding in found] == sorted(finding.severity.rank for finding in found)
        for finding in found:
            keys.add(finding.key)
            parse_query(finding.query or "")
            assert finding.plot is None or finding.plot in plots, finding.key
    assert len(keys) >= 15
