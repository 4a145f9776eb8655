"""Is it learning? What the figures of a run say about that, in plain sentences. Pure.

    findings(Evidence.of(run)) -> [Finding, ...]      the worst first
    verdict(found)             -> Verdict             one sentence above them

The checks are in checks_reward (what is learned), checks_update (how the policy moves) and checks_rollouts (what is generated).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from grpo_async.viewer.report import checks_reward, checks_rollouts, checks_update
from grpo_async.viewer.report.evidence import Evidence, Finding, Level

CHECKS = (*checks_reward.CHECKS, *checks_rollouts.CHECKS, *checks_update.CHECKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The answer in a few words. `is_learning`: None where the data cannot tell."""

    is_learning: bool | None
    text: str


def findings(evidence: Evidence) -> list[Finding]:
    """What the checks find, the worst first; within a level in the order of the checks (rewards before the update)."""
    found = [finding for check in CHECKS if (finding := check(evidence)) is not None]
    return sorted(found, key=lambda finding: finding.level)


def verdict(found: Sequence[Finding]) -> Verdict:
    """From the findings: the reward's trend and the evaluation decide, what is bad explains."""
    by_name = {finding.name: finding for finding in found}
    bad = [finding.title for finding in found if finding.level is Level.BAD]
    trend, held_out = by_name.get("reward-trend"), by_name.get("held-out")
    if "no-steps" in by_name:
        return Verdict(is_learning=None, text="Cannot be told: no optimizer step was finished.")
    if held_out is not None and held_out.level is Level.GOOD:
        tail = " It was better before, though." if "held-out-peaked" in by_name else ""
        return Verdict(is_learning=True, text=f"Yes: the reward on held-out prompts rose.{tail}")
    if trend is not None and trend.level is Level.GOOD:
        if held_out is None:
            return Verdict(is_learning=True, text="The training reward rose.")
        tail = "cannot confirm it" if held_out.level is Level.NOTE else "do not confirm it"
        return Verdict(is_learning=None, text=f"The training reward rose. Held-out prompts {tail}.")
    if bad:
        return Verdict(is_learning=False, text=f"No. {bad[0]}{'' if bad[0].endswith('.') else '.'}")
    if trend is None:
        return Verdict(is_learning=None, text="Cannot be told: there is no reward to look at.")
    if trend.level is Level.NOTE:
        return Verdict(is_learning=None, text=f"Cannot be told yet. {trend.title}.")
    return Verdict(is_learning=False, text=f"Not so far. {trend.title}.")
