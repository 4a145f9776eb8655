"""What the observations of one reward function mean: pure, from numbers to sentences.

A function that scores gold and its twins (another answer in the same shape) alike on every row looks at the form only. That
is what format and length rewards are for, so it is a note; it is an error if the function asks for the gold column by name.
All other functions are judged by what they pay: share = (score - lowest of the row) / (gold - lowest of the row).

Worked example: gold 1.0, empty text 0.0, the prompt again 0.3: share 0.3 >= 0.1, a warning. Garbage 0.95: share 0.95 >= 0.9,
an error if it is so on more than a quarter of the rows.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from grpo_async.findings import Finding, Severity
from grpo_async.findings.finding import worst_first
from grpo_async.rewards.fuzz import Case, CaseKind

PAID = 0.1  # share of gold's range from which a worthless input counts as paid
PAID_LIKE_GOLD = 0.9
_BY_CHANCE = 0.25  # share of the rows up to which garbage may be right by luck
_SAME = 1e-3  # of the function's range: smaller differences are rounding (batches of a reward model)
_BLOCKED_S = 0.25

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One case that was scored alone. With an `error` there is no value; a value of None is the function's own."""

    row: int
    case: Case
    value: float | None = None
    error: str | None = None
    timed_out: bool = False
    duration_s: float = 0.0
    cpu_s: float = 0.0  # of this process; meaningful for functions in threads
    blocked_s: float = 0.0  # longest time that the event loop stood still


@dataclass(frozen=True, slots=True, kw_only=True)
class Observations:
    """All that was seen of one reward function."""

    singles: Sequence[Observation]
    unstable: Sequence[tuple[int, str]] = ()  # (row, input) whose score changes from call to call
    leaking: Sequence[tuple[int, str]] = ()  # (row, input) whose score depends on the other completions of the call
    batch_errors: Sequence[tuple[int, str]] = ()  # (row, error) of calls with inputs that are fine alone
    stopped: str | None = None  # why the rest was not run


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """What is known of the function without calling it."""

    place: str
    timeout_s: float
    slow_s: float
    asks_for_gold: bool


def find(seen: Observations, subject: Subject) -> list[Finding]:
    """Everything worth saying, the worst first."""
    table = _Table(seen.singles)
    return worst_first([*_failures(seen), *_values(table, subject), *_stability(seen), *_times(seen.singles, subject)])


class _Table:
    """The values of all cases, by row; a case without a value (raised, None) is not in it."""

    def __init__(self, singles: Sequence[Observation]) -> None:
        self.singles = singles
        self.scored = [one for one in singles if one.error is None]
        self.rows: dict[int, list[tuple[Case, float]]] = defaultdict(list)
        for one in self.scored:
            if one.value is not None and one.case.kind is not CaseKind.RARE:
                self.rows[one.row].append((one.case, one.value))
        values = [value for row in self.rows.values() for _, value in row]
        self.range = max(values) - min(values) if values else 0.0

    @property
    def has_gold(self) -> bool:
        return any(one.case.kind is CaseKind.GOLD for one in self.singles)

    def gold(self, row: int) -> float | None:
        """The best that a dress of the right answer got."""
        return max((value for case, value in self.rows[row] if case.kind is CaseKind.GOLD), default=None)

    def floor(self, row: int) -> float:
        return min(value for _, value in self.rows[row])

    def is_blind(self) -> bool | None:
        """Whether gold and twins always got the same; None where there is nothing to compare. Where gold has no twins (no
        letters or digits) the answers of other rows stand for them."""
        kinds = {case.kind for row in self.rows.values() for case, _ in row}
        kind = CaseKind.TWIN if CaseKind.TWIN in kinds else CaseKind.WRONG
        compared = False
        for row in self.rows.values():
            by_dress = {case.dress: value for case, value in row if case.kind is CaseKind.GOLD}
            for case, value in row:
                if case.kind is kind and case.dress in by_dress:
                    compared = True
                    if abs(value - by_dress[case.dress]) > _SAME * self.range:
                        return False
        return True if compared else None


def gold_scores(singles: Sequence[Observation]) -> list[float]:
    """What gold got, one number for each row that has it."""
    table = _Table(singles)
    return [gold for row in table.rows if (gold := table.gold(row)) is not None]


def _failures(seen: Observations) -> Iterable[Finding]:
    by_error: dict[tuple[str, bool, bool], list[Observation]] = defaultdict(list)
    for one in seen.singles:
        if one.error is not None:
            by_error[one.error, one.timed_out, one.case.kind is CaseKind.RARE].append(one)
    for (error, timed_out, is_rare), group in by_error.items():
        inputs, rows = _where(group)
        if timed_out:
            do = "Make it faster for such inputs or cut them; in training every group that holds one fails."
            yield Finding(key="fails", severity=Severity.ERROR, what=f"It {error}.", do=do, inputs=inputs, rows=rows)
        elif is_rare:
            do = "Our rollouts do not give this, but a rollout function of your own may; return 0.0 or None for it."
            yield Finding(key="fails", severity=Severity.WARNING, what=f"It {error}.", do=do, inputs=inputs, rows=rows)
        else:
            do = (
                "Catch what can go wrong with a model's text and return 0.0, or None where the function does not apply."
            )
            yield Finding(key="fails", severity=Severity.ERROR, what=f"It {error}.", do=do, inputs=inputs, rows=rows)
    for error, group_rows in _grouped((error, row) for row, error in seen.batch_errors).items():
        what = f"Inputs that are fine one by one fail in one call: it {error}."
        do = "A group is scored in one call; look for code that takes the number of completions for granted."
        yield Finding(key="fails", severity=Severity.ERROR, what=what, do=do, rows=_distinct(group_rows))
    if seen.stopped is not None:
        do = "The inputs after that were not tried."
        yield Finding(key="fails", severity=Severity.ERROR, what=f"{seen.stopped}.", do=do)


def _values(table: _Table, subject: Subject) -> Iterable[Finding]:
    if not table.scored:
        return
    values = [one.value for one in table.scored]
    if all(value is None for value in values):
        what = f"It returned None (not applicable) for all {len(values)} inputs."
        do = "Check the column that says which rows it applies to; as it is, it never takes part in the reward."
        yield Finding(key="values", severity=Severity.WARNING, what=what, do=do)
        return
    if table.range == 0.0:
        do = "Without a difference there is no advantage and nothing to learn; leave it out, or mend it."
        severity = Severity.ERROR if subject.asks_for_gold and table.is_blind() else Severity.WARNING
        yield Finding(
            key="values", severity=severity, what=f"It gives every input the same score ({_number(values)}).", do=do
        )
        return
    if not table.has_gold:
        return
    unscored = sorted({one.row for one in table.scored} - {r for r in table.rows if table.gold(r) is not None})
    if unscored:
        what = "It returned None for the right answer, in every form."
        do = "If it should apply to these rows, check their gold answers: it cannot read them."
        yield Finding(key="values", severity=Severity.WARNING, what=what, do=do, rows=unscored)
    if table.is_blind():
        what = "It does not tell gold from garbage: another answer of the same shape gets the same score."
        if subject.asks_for_gold:
            do = "It asks for the gold column, so it should look at it; check what it compares."
            yield Finding(key="values", severity=Severity.ERROR, what=what, do=do)
        else:
            do = "Right for a format or length reward; give it a small weight beside one that judges the answer."
            yield Finding(key="values", severity=Severity.NOTE, what=what, do=do)
        return
    yield from _gold_too_low(table)
    yield from _paid(table)


def _gold_too_low(table: _Table) -> Iterable[Finding]:
    judged = {row: gold for row in table.rows if (gold := table.gold(row)) is not None}
    margin = PAID * table.range
    beaten: list[tuple[int, str, float]] = []
    for row, gold in judged.items():
        case, best = max(
            ((case, value) for case, value in table.rows[row] if case.kind is not CaseKind.STRESS), key=lambda x: x[1]
        )
        if best - gold > margin:
            beaten.append((row, case.name, best))
    if beaten:
        row, name, best = max(beaten, key=lambda entry: entry[2])
        what = f"Gold is below the maximum: on row {row} gold got {judged[row]:g}, `{name}` got {best:g}."
        do = "The policy will learn what pays most; make the right answer the best one."
        names = _distinct(entry[1] for entry in beaten)
        yield Finding(
            key="gold-too-low",
            severity=Severity.ERROR,
            what=what,
            do=do,
            inputs=names,
            rows=_distinct(e[0] for e in beaten),
        )
    top = max(judged.values(), default=0.0)
    low = [row for row, gold in judged.items() if top - gold > margin]
    lost = [row for row in low if judged[row] - table.floor(row) <= _SAME * table.range]
    if lost:
        what = (
            f"The right answer gets no more than garbage ({judged[lost[0]]:g}), where other rows' gets up to {top:g}."
        )
        do = "Look at the gold answers of these rows: they may be wrong, or in a form that the function cannot read."
        yield Finding(key="gold-too-low", severity=Severity.ERROR, what=what, do=do, rows=lost)
    rest = [row for row in low if row not in lost]
    if rest:
        what = f"The right answer gets less than on other rows ({judged[rest[0]]:g} and up to {top:g})."
        do = "Fine if rows are meant to weigh differently; else look at their gold answers."
        yield Finding(key="gold-too-low", severity=Severity.WARNING, what=what, do=do, rows=rest)


def _paid(table: _Table) -> Iterable[Finding]:
    paid: dict[CaseKind, list[tuple[float, float, Case, int]]] = defaultdict(list)  # (share, value, case, row)
    tried: dict[CaseKind, set[int]] = defaultdict(set)
    for row, entries in table.rows.items():
        gold, floor = table.gold(row), table.floor(row)
        if gold is None or gold - floor <= _SAME * table.range:
            continue
        for case, value in entries:
            if not case.is_worthless and case.kind is not CaseKind.TWIN:
                continue
            kind: CaseKind = CaseKind.WRONG if case.kind is CaseKind.TWIN else case.kind
            tried[kind].add(row)
            share = (value - floor) / (gold - floor)
            if value > 0.0 and share >= PAID:
                paid[kind].append((share, value, case, row))
    for paid_kind, entries_paid in paid.items():
        share, value, case, row = max(entries_paid, key=lambda entry: entry[0])
        like_gold = {entry[3] for entry in entries_paid if entry[0] >= PAID_LIKE_GOLD}
        rows = _distinct(entry[3] for entry in entries_paid)
        if not like_gold:
            severity, how = Severity.WARNING, f"{share:.0%} of what gold gets"
            do = "Fine if it is meant as partial credit; else a policy may settle for it."
        elif len(like_gold) <= _BY_CHANCE * len(tried[paid_kind]):
            severity, how = Severity.WARNING, "as much as gold"
            do = "It is so on few rows, so perhaps by chance; look at these rows."
            rows = sorted(like_gold)
        else:
            severity, how = Severity.ERROR, "as much as gold"
            do = "A policy finds this out quickly; make the function ask for the answer itself."
        what = f"It pays {_NAMES[paid_kind]}: on row {row} `{case.name}` got {value:g}, {how}."
        inputs = _distinct(entry[2].name for entry in entries_paid)
        yield Finding(key="pays", severity=severity, what=what, do=do, inputs=inputs, rows=rows)


_NAMES = {
    CaseKind.WRONG: "wrong answers",
    CaseKind.EMPTY: "empty completions",
    CaseKind.GARBAGE: "garbage",
    CaseKind.ECHO: "the prompt's repetition",
}


def _stability(seen: Observations) -> Iterable[Finding]:
    if seen.unstable:
        rows, inputs = _distinct(row for row, _ in seen.unstable), _distinct(name for _, name in seen.unstable)
        what = "The same input gets different scores from call to call."
        do = (
            "Noise in the reward is noise in the advantage; fix its seed or temperature, or average several judgements."
        )
        yield Finding(key="unstable", severity=Severity.WARNING, what=what, do=do, inputs=inputs, rows=rows)
    if seen.leaking:
        rows, inputs = _distinct(row for row, _ in seen.leaking), _distinct(name for _, name in seen.leaking)
        what = "The score of a completion depends on the other completions of the call."
        do = "Fine if it ranks within a group on purpose; else look for state or for a mix-up of their order."
        yield Finding(key="unstable", severity=Severity.WARNING, what=what, do=do, inputs=inputs, rows=rows)


def _times(singles: Sequence[Observation], subject: Subject) -> Iterable[Finding]:
    in_time = [one for one in singles if not one.timed_out]
    slow = [one for one in in_time if one.duration_s > min(subject.slow_s, 0.5 * subject.timeout_s)]
    if slow:
        worst = max(slow, key=lambda one: one.duration_s)
        inputs, rows = _where(slow)
        what = f"It is slow: `{worst.case.name}` took {worst.duration_s:.1f} s"
        if worst.duration_s > 0.5 * subject.timeout_s:
            what += f", more than half of timeout_s = {subject.timeout_s:g}"
        do = "A group is scored in one call, so its completions share timeout_s; raise it, or make the function faster."
        if subject.place == "thread" and max(one.cpu_s for one in slow) > 0.5 * subject.slow_s:
            do += " It computes, which holds up the trainer's interpreter: set `run_in: process`."
        yield Finding(key="slow", severity=Severity.WARNING, what=what + ".", do=do, inputs=inputs, rows=rows)
    blocking = [one for one in in_time if one.blocked_s > _BLOCKED_S] if subject.place == "event loop" else []
    if blocking:
        worst = max(blocking, key=lambda one: one.blocked_s)
        inputs, rows = _where(blocking)
        what = f"It blocks the event loop for {worst.blocked_s:.1f} s: while it does, none of its other calls goes on."
        do = "Await its I/O (an async HTTP client), or make it a plain `def`, which runs in a thread."
        yield Finding(key="slow", severity=Severity.WARNING, what=what, do=do, inputs=inputs, rows=rows)


def _where(group: Sequence[Observation]) -> tuple[list[str], list[int]]:
    return _distinct(one.case.name for one in group), _distinct(one.row for one in group)


def _distinct(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))


def _grouped(pairs: Iterable[tuple[str, int]]) -> Mapping[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for key, item in pairs:
        groups[key].append(item)
    return groups


def _number(values: Sequence[float | None]) -> str:
    return f"{next(value for value in values if value is not None):g}"
