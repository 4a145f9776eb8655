"""What the observations of one reward function mean, and the report of its check: behind `grpo-async check-reward`.

A function that scores gold and its lookalikes (another answer in the same shape) alike on every row looks at the form only. That
is what format and length rewards are for, so it is a note; it is an error if the function asks for the gold column by name.
All other functions are judged by what they pay: fraction = (score - lowest of the row) / (gold - lowest of the row).

Worked example: gold 1.0, empty text 0.0, the prompt again 0.3: fraction 0.3 >= 0.1, a warning. Garbage 0.95: fraction 0.95 >= 0.9,
an error if it is so on more than a quarter of the rows.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from grpo_async.config.interaction_sections import RewardSection
from grpo_async.findings import Finding, Severity
from grpo_async.findings.finding import worst_first
from grpo_async.records import Prompt
from grpo_async.rewards.audit import ROUNDING, Observation, Observations, Observer
from grpo_async.rewards.function import RewardFunction, load_reward
from grpo_async.rewards.fuzz import Case, CaseKind, cases_of, find_gold_column

_PAID = 0.1  # of gold's range: from here on a worthless input counts as paid
_PAID_LIKE_GOLD = 0.9
_BY_CHANCE = 0.25  # of the rows: up to here garbage may be right by luck

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRange:
    """Lowest, mean and highest score of one kind of input."""

    lowest: float
    mean: float
    highest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> ScoreRange | None:
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
    gold: ScoreRange | None  # the best form of the right answer, over rows
    others: Mapping[str, ScoreRange]  # by kind of input
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
        reward: the function, to be looked at; what is called is the same one in a worker process.
        section: its section of the config; `timeout_s` bounds every call.
        path: dotted path of the section.
        prompts: rows; at least one.
        gold_column: the column of right answers; None = the first of the usual names that a row has.
        seed: of the garbage.
        slow_s: a completion that takes longer is reported.
        on_progress: called with (inputs done, inputs in all).

    Raises:
        ConfigError: the function cannot be loaded.
    """
    cases = cases_of(prompts, gold_column=gold_column, seed=seed)
    # one worker: there is one call at a time, and the start of a second would be taken for a slow call
    tried = load_reward(section.model_copy(update={"run_in": "process"}), path, num_workers=1)
    try:
        seen = asyncio.run(Observer(tried, prompts, cases, seed=seed, slow_s=slow_s, on_progress=on_progress).all())
    finally:
        tried.close()
    asks = any(reward.names(name) for prompt in prompts if (name := gold_column or find_gold_column(prompt.columns)))
    return make_report(
        seen, name=reward.name, place=reward.place, timeout_s=reward.timeout_s, slow_s=slow_s, asks_for_gold=asks
    )


def make_report(
    seen: Observations, *, name: str, place: str, timeout_s: float, slow_s: float, asks_for_gold: bool
) -> RewardReport:
    """Counts, scores and findings of what was seen of the function `name`, which runs in `place` (event loop, thread, process)."""
    singles, table = seen.singles, _Table(seen.singles)
    by_kind: dict[CaseKind, list[float]] = {kind: [] for kind in CaseKind if kind is not CaseKind.GOLD}
    for one in table.scored:
        if one.value is not None and one.case.kind in by_kind:
            by_kind[one.case.kind].append(one.value)
    slowest = max(singles, key=lambda one: one.duration_s, default=None)
    is_process = place == "process"
    findings = [*_failures(seen, is_process=is_process), *_values(table, asks_for_gold), *_stability(seen)]
    findings += _slowness(singles, is_process=is_process, timeout_s=timeout_s, slow_s=slow_s)
    return RewardReport(
        name=name,
        place=place,
        num_inputs=len(singles),
        num_failed=len(singles) - len(table.scored),
        num_none=sum(one.value is None for one in table.scored),
        gold=ScoreRange.of(list(table.golds.values())),
        others={
            kind.value: scores for kind, values in by_kind.items() if (scores := ScoreRange.of(values)) is not None
        },
        median_s=statistics.median(one.duration_s for one in singles) if singles else 0.0,
        longest_s=slowest.duration_s if slowest else 0.0,
        slowest_input=slowest.case.name if slowest else None,
        findings=worst_first(findings),
    )


class _Table:
    """The values of all cases, by row; a case without a value (raised, None) is not in it."""

    def __init__(self, singles: Sequence[Observation]) -> None:
        self.has_gold = any(one.case.kind is CaseKind.GOLD for one in singles)
        self.scored = [one for one in singles if one.error is None]
        self.rows: dict[int, list[tuple[Case, float]]] = defaultdict(list)
        for one in self.scored:
            if one.value is not None:
                self.rows[one.row].append((one.case, one.value))
        values = [value for row in self.rows.values() for _, value in row]
        self.range = max(values) - min(values) if values else 0.0
        self.floors = {row: min(value for _, value in entries) for row, entries in self.rows.items()}
        self.golds: dict[int, float] = {}
        """The best that a rendering of the right answer got, by row."""
        for row, entries in self.rows.items():
            got = [value for case, value in entries if case.kind is CaseKind.GOLD]
            if got:
                self.golds[row] = max(got)

    def is_blind(self) -> bool:
        """Whether gold and lookalikes always got the same, and there was something to compare. Where gold has no lookalikes (no
        letters or digits) the answers of other rows stand for them."""
        kinds = {case.kind for row in self.rows.values() for case, _ in row}
        kind = CaseKind.LOOKALIKE if CaseKind.LOOKALIKE in kinds else CaseKind.WRONG
        differences = []
        for row in self.rows.values():
            by_rendering = {case.rendering: value for case, value in row if case.kind is CaseKind.GOLD}
            for case, value in row:
                if case.kind is kind and case.rendering in by_rendering:
                    differences.append(abs(value - by_rendering[case.rendering]))
        return bool(differences) and max(differences) <= ROUNDING * self.range


def _failures(seen: Observations, *, is_process: bool) -> Iterator[Finding]:
    by_error: dict[tuple[str, bool], list[Observation]] = defaultdict(list)
    for one in seen.singles:
        if one.error is not None:
            by_error[one.error, one.is_lost].append(one)
    for (error, is_lost), group in by_error.items():
        fix = "Catch what can go wrong with a model's text and return 0.0, or None where the function does not apply."
        if is_lost:
            fix = "Make it safe and fast for such inputs, or cut them; in training every group that holds one fails."
        if is_lost and not is_process:
            fix += " Set `run_in: process`: in the trainer's own process it could not be ended, and might end or hold the run."
        yield _about("fails", Severity.ERROR, f"It {error}.", fix, group)
    rows_of: dict[str, list[int]] = defaultdict(list)
    for row, error in seen.batch_errors:
        rows_of[error].append(row)
    for error, rows in rows_of.items():
        title = f"Inputs that are fine one by one fail in one call: it {error}."
        fix = "A group is scored in one call; look for code that takes the number of completions for granted."
        yield Finding(key="fails", severity=Severity.ERROR, title=title, fix=fix, rows=_distinct(rows))
    if seen.stopped is not None:
        fix = "The inputs after that were not tried."
        yield Finding(key="fails", severity=Severity.ERROR, title=f"{seen.stopped}.", fix=fix)


def _values(table: _Table, asks_for_gold: bool) -> Iterator[Finding]:
    def finding(severity: Severity, title: str, fix: str, rows: Sequence[int] = ()) -> Finding:
        return Finding(key="values", severity=severity, title=title, fix=fix, rows=rows)

    if not table.scored:
        return
    numbers = [one.value for one in table.scored if one.value is not None]
    if not numbers:
        title = f"It returned None (not applicable) for all {len(table.scored)} inputs."
        fix = "Check the column that says which rows it applies to; as it is, it never takes part in the reward."
        yield finding(Severity.WARNING, title, fix)
        return
    if table.range == 0.0:
        title = f"It gives every input the same score ({numbers[0]:g})."
        fix = "Without a difference there is no advantage and nothing to learn; leave it out, or fix it."
        yield finding(Severity.ERROR if asks_for_gold and table.is_blind() else Severity.WARNING, title, fix)
        return
    if not table.has_gold:
        return
    unscored = sorted({one.row for one in table.scored} - table.golds.keys())
    if unscored:
        title = "It returned None for the right answer, in every form."
        fix = "If it should apply to these rows, check their gold answers: it cannot read them."
        yield finding(Severity.WARNING, title, fix, unscored)
    if table.is_blind():
        title = "It does not tell gold from garbage: another answer of the same shape gets the same score."
        if asks_for_gold:
            fix = "It asks for the gold column, so it should look at it; check what it compares."
            yield finding(Severity.ERROR, title, fix)
        else:
            fix = "Right for a format or length reward; give it a small weight next to one that judges the answer."
            yield finding(Severity.NOTE, title, fix)
        return
    yield from _gold_too_low(table)
    yield from _paid(table)


def _gold_too_low(table: _Table) -> Iterator[Finding]:
    margin = _PAID * table.range
    better: list[tuple[float, int, str]] = []  # (best score, row, its input)
    for row, gold in table.golds.items():
        judged = [(case, value) for case, value in table.rows[row] if case.kind is not CaseKind.STRESS]
        case, best = max(judged, key=lambda entry: entry[1])
        if best - gold > margin:
            better.append((best, row, case.name))
    if better:
        best, row, name = max(better, key=lambda entry: entry[0])
        yield Finding(
            key="gold-too-low",
            severity=Severity.ERROR,
            title=f"Gold is below the maximum: on row {row} gold got {table.golds[row]:g}, `{name}` got {best:g}.",
            fix="The policy will learn what pays most; make the right answer the best one.",
            inputs=_distinct(name for _, _, name in better),
            rows=_distinct(row for _, row, _ in better),
        )
    top = max(table.golds.values(), default=0.0)
    low = [row for row, gold in table.golds.items() if top - gold > margin]
    lost = [row for row in low if table.golds[row] - table.floors[row] <= ROUNDING * table.range]
    if lost:
        title = f"The right answer gets no more than garbage ({table.golds[lost[0]]:g}), where other rows' gets up to {top:g}."
        fix = "Look at the gold answers of these rows: they may be wrong, or in a form that the function cannot read."
        yield Finding(key="gold-too-low", severity=Severity.ERROR, title=title, fix=fix, rows=lost)
    rest = [row for row in low if row not in lost]
    if rest:
        title = f"The right answer gets less than on other rows ({table.golds[rest[0]]:g} and up to {top:g})."
        fix = "Fine if rows are meant to weigh differently; else look at their gold answers."
        yield Finding(key="gold-too-low", severity=Severity.WARNING, title=title, fix=fix, rows=rest)


_NAMES = {
    CaseKind.WRONG: "wrong answers",
    CaseKind.EMPTY: "empty completions",
    CaseKind.GARBAGE: "garbage",
    CaseKind.ECHO: "the prompt's repetition",
}


def _paid(table: _Table) -> Iterator[Finding]:
    paid: dict[CaseKind, list[tuple[float, float, Case, int]]] = defaultdict(list)  # (fraction, value, case, row)
    tried: dict[CaseKind, set[int]] = defaultdict(set)
    for row, gold in table.golds.items():
        floor = table.floors[row]
        if gold - floor <= ROUNDING * table.range:
            continue
        for case, value in table.rows[row]:
            kind: CaseKind = CaseKind.WRONG if case.kind is CaseKind.LOOKALIKE else case.kind
            if kind not in _NAMES:
                continue
            tried[kind].add(row)
            fraction = (value - floor) / (gold - floor)
            if value > 0.0 and fraction >= _PAID:
                paid[kind].append((fraction, value, case, row))
    for paid_kind, found in paid.items():
        fraction, value, case, row = max(found, key=lambda entry: entry[0])
        like_gold = {entry[3] for entry in found if entry[0] >= _PAID_LIKE_GOLD}
        rows = _distinct(entry[3] for entry in found)
        if not like_gold:
            severity, how = Severity.WARNING, f"{fraction:.0%} of what gold gets"
            fix = "Fine if it is meant as partial credit; else a policy may settle for it."
        elif len(like_gold) <= _BY_CHANCE * len(tried[paid_kind]):
            severity, how = Severity.WARNING, "as much as gold"
            fix = "It is so on few rows, so perhaps by chance; look at these rows."
            rows = sorted(like_gold)
        else:
            severity, how = Severity.ERROR, "as much as gold"
            fix = "A policy finds this out quickly; make the function ask for the answer itself."
        title = f"It pays {_NAMES[paid_kind]}: on row {row} `{case.name}` got {value:g}, {how}."
        inputs = _distinct(entry[2].name for entry in found)
        yield Finding(key="pays", severity=severity, title=title, fix=fix, inputs=inputs, rows=rows)


def _stability(seen: Observations) -> Iterator[Finding]:
    for found, title, fix in (
        (
            seen.unstable,
            "The same input gets different scores from call to call.",
            "Noise in the reward is noise in the advantage; fix its seed or temperature, or average several judgments.",
        ),
        (
            seen.leaking,
            "The score of a completion depends on the other completions of the call.",
            "Fine if it ranks within a group on purpose; else look for state or for a mix-up of their order.",
        ),
    ):
        if found:
            inputs, rows = _distinct(name for _, name in found), _distinct(row for row, _ in found)
            yield Finding(key="unstable", severity=Severity.WARNING, title=title, fix=fix, inputs=inputs, rows=rows)


def _slowness(
    singles: Sequence[Observation], *, is_process: bool, timeout_s: float, slow_s: float
) -> Iterator[Finding]:
    slow = [one for one in singles if not one.is_lost and one.duration_s > min(slow_s, 0.5 * timeout_s)]
    if not slow:
        return
    worst = max(slow, key=lambda one: one.duration_s)
    title = f"It is slow: `{worst.case.name}` took {worst.duration_s:.1f} s"
    if worst.duration_s > 0.5 * timeout_s:
        title += f", more than half of timeout_s = {timeout_s:g}"
    fix = "A group is scored in one call, so its completions share timeout_s; raise it, or make the function faster."
    if not is_process:
        fix += " If it computes, it holds up the trainer's interpreter: set `run_in: process`."
    yield _about("slow", Severity.WARNING, f"{title}.", fix, slow)


def _about(key: str, severity: Severity, title: str, fix: str, group: Sequence[Observation]) -> Finding:
    """A finding that names the inputs and rows of a group."""
    inputs, rows = _distinct(one.case.name for one in group), _distinct(one.row for one in group)
    return Finding(key=key, severity=severity, title=title, fix=fix, inputs=inputs, rows=rows)


def _distinct(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))
