"""Is it learning? By how much, how certain, and compared with what. Pure.

Held-out prompts decide where there are two evaluations; else the sampled reward. A change counts when its 95 % interval excludes 0
and it is at least 2 % of the range of rewards; a run that does not get beyond always giving the most frequent answer is told so.
Without a change, the first finding that explains it is named; where the interval is too wide for an answer, that is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_async.findings.checks import CHECKS, beaten_by_baseline, change_numbers, moved_by
from grpo_async.findings.evidence import Evidence
from grpo_async.findings.finding import Finding, Severity, figure, worst_first
from grpo_async.findings.statistics import Change

_LITTLE = 0.02  # of the range of rewards
_TOO_WIDE = 0.1  # of it: a rise of so much that cannot be excluded leaves the question open
_MANY_STEPS = 100
_BLOCKING = ("reward-fails", "unscored", "truncated", "no-gradient", "hardly-moves", "zero-variance", "failed-groups")


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`is_learning`: None where the data cannot tell. `key`: in one word, for programs: learns, little, baseline, unconfirmed,
    collapsed, fell, flat, unclear, too-early, no-steps, or the key of the finding that keeps it from learning. `numbers`: first,
    last, change, low, high (95 %), count, and baseline, of the reward that decided."""

    is_learning: bool | None
    key: str
    text: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def find(evidence: Evidence) -> list[Finding]:
    """What the checks find, the worst first; within a severity in the order of the checks."""
    return worst_first([finding for check in CHECKS if (finding := check(evidence)) is not None])


def judge(evidence: Evidence, found: Sequence[Finding] | None = None) -> Verdict:
    """The answer. `found`: what `find` said, where it was asked already."""
    by_key = {finding.key: finding for finding in (find(evidence) if found is None else found)}
    causes = [by_key[key] for key in _BLOCKING if key in by_key and by_key[key].severity is Severity.ERROR]
    held_out, sampled = evidence.held_out(), evidence.trend("reward")
    scale = evidence.reward_range
    still = any(cause.key in ("hardly-moves", "no-gradient") for cause in causes)  # then a fall is chance
    if held_out is not None and (held_out.has_risen or (held_out.has_fallen and not still)):
        return _by_held_out(evidence, held_out, sampled, by_key, scale)
    if not evidence.metrics and "reward-fails" not in by_key and "zero-variance" not in by_key:
        return Verdict(
            is_learning=None,
            key="no-steps",
            text=f"Cannot be told: no optimizer step was finished. {by_key['no-steps'].text}",
        )
    if causes:
        first = causes[0]
        text = f"No. {_sentence(first.what)} {first.text} {first.do}".strip()
        return Verdict(is_learning=False, key=first.key, text=text, numbers=first.numbers)
    if (collapsed := by_key.get("collapsed")) is not None:
        return Verdict(
            is_learning=False,
            key="collapsed",
            text=f"No. {_sentence(collapsed.what)} {collapsed.text}",
            numbers=collapsed.numbers,
        )
    if sampled is None:
        num = len(evidence.values("reward"))
        text = (
            f"Cannot be told yet: there are only {num} steps with a reward."
            if num
            else "Cannot be told: there is no reward to look at."
        )
        return Verdict(is_learning=None, key="too-early", text=text)
    return _by_sampled(evidence, held_out, sampled, by_key, scale)


def _by_held_out(
    evidence: Evidence, change: Change, sampled: Change | None, by_key: Mapping[str, Finding], scale: float
) -> Verdict:
    """The held-out reward changed by more than chance."""
    moved, numbers = f"{moved_by(change)}", change_numbers(change)
    last = evidence.evaluated()[-1]
    baseline = last.metrics.get("majority_baseline")
    against = "" if baseline is None else f" Always the most frequent answer would get {figure(baseline)}."
    numbers |= {} if baseline is None else {"baseline": baseline}
    peak = by_key.get("held-out-peaked")
    tail = f" {peak.what}: {peak.text}" if peak is not None else ""
    if change.has_fallen:
        text = f"No. The reward on held-out prompts fell {moved}.{tail}"
        return Verdict(is_learning=False, key="collapsed" if peak else "fell", text=text, numbers=numbers)
    if beaten_by_baseline(last, change) is not None:
        text = f"No more than the most frequent answer: the reward on held-out prompts rose {moved}.{against}"
        return Verdict(is_learning=False, key="baseline", text=text, numbers=numbers)
    if change.value < _LITTLE * scale:
        text = f"Hardly: the reward on held-out prompts rose {moved}.{against}"
        return Verdict(is_learning=None, key="little", text=text, numbers=numbers)
    text = f"Yes: the reward on held-out prompts rose {moved}.{against}{tail}"
    return Verdict(is_learning=True, key="learns", text=text, numbers=numbers)


def _by_sampled(
    evidence: Evidence, held_out: Change | None, sampled: Change, by_key: Mapping[str, Finding], scale: float
) -> Verdict:
    moved, numbers = moved_by(sampled), change_numbers(sampled)
    if sampled.has_fallen:
        return Verdict(is_learning=False, key="fell", text=f"No. The sampled reward fell {moved}.", numbers=numbers)
    if sampled.has_risen:
        if sampled.value < _LITTLE * scale:
            return Verdict(
                is_learning=None, key="little", text=f"Hardly: the sampled reward rose {moved}.", numbers=numbers
            )
        if held_out is not None:
            text = f"Not confirmed: the sampled reward rose {moved}, but that on held-out prompts goes {moved_by(held_out)}."
            return Verdict(is_learning=None, key="unconfirmed", text=text, numbers=change_numbers(held_out))
        why = next(
            (by_key[key] for key in ("evaluation-failed", "one-evaluation", "no-evaluation") if key in by_key), None
        )
        tail = "" if why is None else f" {_sentence(why.what)}"
        text = f"By the sampled reward, yes: it rose {moved}. Held-out prompts cannot confirm it.{tail}"
        return Verdict(is_learning=True, key="learns", text=text, numbers=numbers)
    widest = max(sampled.high, 0.0 if held_out is None else held_out.high)
    trend = by_key.get("reward-trend")
    if widest < _TOO_WIDE * scale or sampled.count >= _MANY_STEPS or (trend is not None and "top" in trend.what):
        text = f"No. {_sentence(trend.what if trend else 'The reward is flat')} The sampled reward goes {moved}."
        return Verdict(is_learning=False, key="flat", text=text, numbers=numbers)
    text = f"Cannot be told yet: the sampled reward goes {moved}, so it may have risen or not."
    return Verdict(is_learning=None, key="unclear", text=text, numbers=numbers)


def _sentence(words: str) -> str:
    return f"{words}{'' if words.endswith('.') else '.'}"
