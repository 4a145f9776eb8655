"""The check of one reward function from beginning to end, and its report: behind `grpo-async check-reward`."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from grpo_async.config.interaction_sections import RewardSection
from grpo_async.findings import Finding, Severity
from grpo_async.records import Prompt
from grpo_async.rewards.audit import cases_of
from grpo_async.rewards.audit_process import observe_in_process
from grpo_async.rewards.findings import Observations, Subject, find, gold_scores
from grpo_async.rewards.function import RewardFunction
from grpo_async.rewards.fuzz import CaseKind, find_gold_column


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Lowest, mean and highest score of one kind of input."""

    lowest: float
    mean: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Scores | None:
        if not values:
            return None
        return cls(lowest=min(values), mean=statistics.fmean(values), highest=max(values))


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReport:
    """What came out for one reward function. Times are seconds for one completion; findings begin with the worst."""

    name: str
    place: str
    num_inputs: int
    num_failed: int
    num_none: int
    gold: Scores | None  # the best form of the right answer, over rows
    others: Mapping[str, Scores]  # by kind of input
    median_s: float
    longest_s: float
    slowest_input: str | None
    findings: Sequence[Finding]

    @property
    def worst(self) -> Severity | None:
        return self.findings[0].severity if self.findings else None


def check_reward(
    reward: RewardFunction,
    section: RewardSection,
    path: str,
    prompts: Sequence[Prompt],
    *,
    gold_column: str | None = None,
    seed: int = 0,
    slow_s: float = 1.0,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> RewardReport:
    """Check one reward function on some rows; ends in bounded time, whatever the function does.

    Args:
        reward: the function, to be looked at; it is called in another process.
        section: its section of the config; `timeout_s` bounds every call.
        path: dotted path of the section.
        prompts: rows; at least one.
        gold_column: the column of right answers; None = the first of the usual names that a row has.
        seed: of the garbage.
        slow_s: a completion that takes longer is reported.
        on_progress: called with (inputs done, inputs in all).

    Raises:
        ConfigError: the function cannot be loaded, or the rows cannot be sent to another process.
    """
    cases = cases_of(prompts, gold_column=gold_column, seed=seed)
    seen = observe_in_process(section, path, prompts, cases, seed=seed, slow_s=slow_s, on_progress=on_progress)
    asks = any(reward.names(name) for prompt in prompts if (name := gold_column or find_gold_column(prompt.columns)))
    subject = Subject(place=reward.place, timeout_s=reward.timeout_s, slow_s=slow_s, asks_for_gold=asks)
    return make_report(reward.name, seen, subject)


def make_report(name: str, seen: Observations, subject: Subject) -> RewardReport:
    """Counts, scores and findings of what was seen."""
    singles = seen.singles
    scored = [one for one in singles if one.error is None]
    others = {}
    for kind in CaseKind:
        values = [one.value for one in scored if one.case.kind is kind and one.value is not None]
        scores = None if kind is CaseKind.GOLD else Scores.of(values)
        if scores is not None:
            others[kind.value] = scores
    slowest = max(singles, key=lambda one: one.duration_s, default=None)
    return RewardReport(
        name=name,
        place=subject.place,
        num_inputs=len(singles),
        num_failed=len(singles) - len(scored),
        num_none=sum(one.value is None for one in scored),
        gold=Scores.of(gold_scores(singles)),
        others=others,
        median_s=statistics.median(one.duration_s for one in singles) if singles else 0.0,
        longest_s=slowest.duration_s if slowest else 0.0,
        slowest_input=slowest.case.name if slowest else None,
        findings=find(seen, subject),
    )
