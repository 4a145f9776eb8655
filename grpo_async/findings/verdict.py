"""Is it learning? By how much, how certain, and compared with what. Pure.

Held-out prompts decide where there are two evaluations; else the sampled reward. A change counts when its 95 % interval excludes 0
and, if it is a rise, it is at least 2 % of the range of rewards; a run that only learned to give the most frequent answer has not
learned.
Without a change, the first finding that explains it is named; where the interval is too wide for an answer, that is the answer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_async.findings.evidence import Evidence
from grpo_async.findings.finding import Finding, Severity, sentence, worst_first
from grpo_async.findings.rules import RULES, is_no_better_than_baseline
from grpo_async.utils.run_state import RUNNING

_LITTLE = 0.02  # of the range of rewards
_TOO_WIDE = 0.1  # of it: a rise of so much that cannot be excluded leaves the question open
_MANY_STEPS = 100
_BLOCKING = (
    "reward-fails",
    "unscored",
    "truncated",
    "no-gradient",
    "hardly-moves",
    "collapsed",
    "zero-variance",
    "failed-groups",
)


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
    """What the rules find, the worst first; within a severity in the order of the rules."""
    return worst_first([finding for rule in RULES if (finding := rule(evidence)) is not None])


def judge(evidence: Evidence, found: Sequence[Finding] | None = None) -> Verdict:
    """The answer. `found`: what `find` said, where it was asked already."""
    by_key = {finding.key: finding for finding in (find(evidence) if found is None else found)}
    causes = [by_key[key] for key in _BLOCKING if key in by_key and by_key[key].severity is Severity.ERROR]
    change, sampled, scale = evidence.held_out(), evidence.trend("reward"), evidence.reward_range
    cannot_move = any(cause.key in ("hardly-moves", "no-gradient") for cause in causes)  # then a fall is chance
    if change is not None and (change.has_risen or (change.has_fallen and not cannot_move)):
        last, held_out, peak = evidence.evaluated()[-1], by_key["held-out"], by_key.get("held-out-peaked")
        if change.has_fallen:
            return _verdict(False, "collapsed" if peak else "fell", "No", held_out, peak)
        if is_no_better_than_baseline(last, change):
            return _verdict(False, "baseline", "No", held_out)
        if change.value < _LITTLE * scale:
            return _verdict(None, "little", "Hardly", held_out)
        return _verdict(True, "learns", "Yes", held_out, peak)
    if causes:
        return _verdict(False, causes[0].key, "No", causes[0])
    if "no-steps" in by_key:
        return _verdict(
            None,
            "no-steps",
            "Too early to say" if evidence.status == RUNNING else "Cannot say",
            by_key["no-steps"],
        )
    trend = by_key.get("reward-trend")
    if sampled is None or trend is None:
        return _verdict(None, "too-early", "Too early to say", trend)
    if sampled.has_fallen:
        return _verdict(False, "fell", "No", trend)
    if sampled.has_risen:
        if sampled.value < _LITTLE * scale:
            return _verdict(None, "little", "Hardly", trend)
        if change is not None:
            return _verdict(None, "unconfirmed", "Not confirmed", by_key["held-out"])
        why_none = ("failed-evaluation", "few-evaluations", "no-evaluation")
        evaluation = next(by_key[key] for key in why_none if key in by_key)
        return _verdict(True, "learns", "Yes, by the sampled reward", trend, evaluation)
    widest = max(sampled.high, 0.0 if change is None else change.high)
    if widest < _TOO_WIDE * scale or sampled.count >= _MANY_STEPS:
        return _verdict(False, "flat", "No", trend)
    return _verdict(None, "unclear", "Not clear yet: it may or may not have risen", trend)


def _verdict(is_learning: bool | None, key: str, answer: str, *findings: Finding | None) -> Verdict:
    """The answer in a few words, then the findings that it comes from, with their numbers; of what keeps it from learning also what
    to do."""
    known = [finding for finding in findings if finding is not None]
    text = [f"{answer}.", *(f"{sentence(each.title)} {each.text}".strip() for each in known)]
    text += [known[0].fix] if key in _BLOCKING and known[0].fix else []
    return Verdict(is_learning=is_learning, key=key, text=" ".join(text), numbers=known[0].numbers if known else {})
