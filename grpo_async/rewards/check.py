"""`check-reward`: tries one reward function on completions whose quality is known.

Every candidate of a row is scored alone, which shows what raises or hangs; then all of a row in one call, like a group in
training, which shows scores that depend on chance or on the other completions.

Worked example, gold "72": the right answer is tried as `72`, `\\boxed{72}`, `<answer>72</answer>` and as a code block, each with
and without thinking before it, and the best score counts: 1.0. "83", a wrong answer of the same shape, gets 0.0 in all these forms.
Garbage that gets 0.3, or 30 % of the right answer's score, is a warning; 0.95 on more than a quarter of the rows is an error.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_async.findings import Finding, Severity
from grpo_async.findings.finding import worst_first
from grpo_async.records import Prompt
from grpo_async.rewards.call import RewardError
from grpo_async.rewards.function import RewardFunction
from grpo_async.rewards.text import answer_of_solution

GOLD_COLUMNS = ("answer", "solution", "ground_truth", "target", "label")
GOLD, WRONG, LONG = "right answer", "wrong answer", "very long"
_PART, _FULL = 0.1, 0.9  # fractions of the right answer's score, above the lowest score of the row
_BY_CHANCE = 0.25  # fraction of the rows in which garbage may be right by chance
_ROUNDING = 1e-3  # of the range of scores: batching alone changes a reward model's scores by less
_MAX_LOST = 4  # calls that cost a process; after that the rest is not tried

ScoreByRow = Mapping[int, float]
"""Of the forms of an answer, the best score counts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReport:
    """The results for one reward function. Times are seconds of a call with one completion."""

    name: str
    runs_in: str
    num_calls: int
    num_failed: int
    scores: Mapping[str, Mapping[str, float]]  # by kind of completion: lowest, mean and highest over the rows
    median_s: float
    longest_s: float
    findings: Sequence[Finding]  # the worst first

    @property
    def has_errors(self) -> bool:
        return any(finding.severity is Severity.ERROR for finding in self.findings)


def gold_of(prompt: Prompt, gold_column: str | None) -> str | None:
    """The right answer of a row as text, from `gold_column` or else the first usual column that holds a text or number."""
    for name in GOLD_COLUMNS if gold_column is None else (gold_column,):
        value = prompt.columns.get(name)
        if isinstance(value, (str, int, float)) and str(value).strip():
            return str(value).strip()
    return None


def candidates(prompt: Prompt, gold: str | None) -> list[tuple[str, str]]:
    """(kind, text) of the completions to try for a row."""
    found = []
    if gold is not None:
        final = answer_of_solution(gold) or gold
        for answer in dict.fromkeys([gold, final]):
            found += [(GOLD, text) for text in _forms(answer)]
        if (wrong := _same_shape(final)) != final:
            found += [(WRONG, text) for text in _forms(wrong)]
    return [
        *found,
        ("empty", ""),
        ("prompt", prompt.messages[-1].content),
        ("garbage", "bako tuvi reso dalu pemi zofa " * 10),
        ("garbage", "\\boxed{qwx}<answer>qwx</answer>"),
        ("code that does nothing", "```python\npass\n```"),
        ("counting", " ".join(str(number) for number in range(101))),
        ("odd characters", "\x00\x1b\u202e👍🏽" * 20 + "9^{9^{9^{9}}}" + "\\boxed{" * 100),
        (LONG, "so it goes on and on " * 10_000),
    ]


def _forms(answer: str) -> list[str]:
    plain = [answer, f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>", f"```python\n{answer}\n```"]
    return [*plain, *(f"<think>Let me see.</think>\n{text}" for text in plain)]


def _same_shape(text: str) -> str:
    """Replace letters and digits: "72 km" -> "83 ln"; a text without any is returned unchanged."""
    digits, letters = "0123456789", "abcdefghijklmnopqrstuvwxyz"
    shifted = "1234567891", letters[1:] + letters[0]
    return text.translate(str.maketrans(digits + letters + letters.upper(), "".join(shifted) + shifted[1].upper()))


@dataclass(slots=True, kw_only=True)
class Observations:
    """The calls of one function. A `value` is a score, None (not applicable), or the text of an error."""

    values: list[tuple[int, str, float | str | None]] = field(default_factory=list)  # (row, kind, value)
    seconds: list[float] = field(default_factory=list)  # durations of these calls
    changing: set[int] = field(default_factory=set)  # rows with a score that differs in the next call
    group_errors: dict[str, list[int]] = field(default_factory=dict)  # where each completion is fine alone -> rows
    num_lost: int = 0  # calls that took too long or ended their process


def check_reward(
    reward: RewardFunction, prompts: Sequence[Prompt], *, runs_in: str, gold_column: str | None = None
) -> RewardReport:
    """Check one reward function on some rows.

    Args:
        reward: the function; in a worker process, which can be killed, the check always ends in bounded time.
        prompts: rows; at least one.
        runs_in: where it runs in training: event loop, thread, process.
        gold_column: the column of right answers; None = the first of the usual names that a row has.
    """
    golds = [gold_of(prompt, gold_column) for prompt in prompts]
    seen = asyncio.run(_observe(reward, prompts, golds))
    asks_for_gold = any(map(reward.has_parameter, (gold_column,) if gold_column else GOLD_COLUMNS))
    return report(seen, name=reward.name, runs_in=runs_in, asks_for_gold=asks_for_gold)


async def _observe(reward: RewardFunction, prompts: Sequence[Prompt], golds: Sequence[str | None]) -> Observations:
    seen = Observations()

    async def call(prompt: Prompt, texts: Sequence[str]) -> list[float | None] | str:
        made = [[{"role": "assistant", "content": text}] if prompt.is_conversational else text for text in texts]
        try:
            outcome = await reward.score(
                [prompt.as_given()] * len(texts),
                made,
                [[1] * (1 + len(text) // 4) for text in texts],  # there is no tokenizer here
                {column: [value] * len(texts) for column, value in prompt.columns.items()},
            )
        except RewardError as error:
            seen.num_lost += error.is_lost
            return error.problem.splitlines()[0]
        return outcome.values

    await call(prompts[0], [golds[0] or "1"])  # imports and caches are not measured
    seen.num_lost = 0
    for row, prompt in enumerate(prompts):
        alone: dict[str, float | None] = {}  # score by text
        for kind, text in candidates(prompt, golds[row]):
            if seen.num_lost >= _MAX_LOST:
                return seen
            began = time.perf_counter()
            values = await call(prompt, [text])
            seen.seconds.append(time.perf_counter() - began)
            seen.values.append((row, kind, values if isinstance(values, str) else values[0]))
            if not isinstance(values, str):
                alone[text] = values[0]
        if len(alone) < 2 or sum(seen.seconds[-len(alone) :]) > 0.5 * reward.timeout_s:  # too slow for all in one call
            continue
        together = await call(prompt, list(alone)[::-1])
        if isinstance(together, str):
            seen.group_errors.setdefault(together, []).append(row)
            continue
        tolerance = _ROUNDING * _range([value for value in alone.values() if value is not None])
        for one, other in zip(reversed(alone.values()), together, strict=True):
            if one != other and (one is None or other is None or abs(one - other) > tolerance):
                seen.changing.add(row)
    return seen


def _range(values: Sequence[float]) -> float:
    return max(values, default=0.0) - min(values, default=0.0)


# -------------------------------------------------------------------------------------------------- what it means


def report(seen: Observations, *, name: str, runs_in: str, asks_for_gold: bool) -> RewardReport:
    """Scores and findings from the observations of the function `name`, which runs in `runs_in` (event loop, thread, process)."""
    best: dict[str, dict[int, float]] = defaultdict(dict)  # by kind
    for row, kind, value in seen.values:
        if isinstance(value, float):
            best[kind][row] = max(value, best[kind].get(row, value))
    scores = {
        kind: {"lowest": min(rows.values()), "mean": statistics.fmean(rows.values()), "highest": max(rows.values())}
        for kind, rows in best.items()
    }
    return RewardReport(
        name=name,
        runs_in=runs_in,
        num_calls=len(seen.values),
        num_failed=sum(isinstance(value, str) for *_, value in seen.values),
        scores=scores,
        median_s=statistics.median(seen.seconds or [0.0]),
        longest_s=max(seen.seconds, default=0.0),
        findings=worst_first([*_faults(seen, runs_in), *_values(seen, best, asks_for_gold)]),
    )


def _faults(seen: Observations, runs_in: str) -> Iterator[Finding]:
    """Findings that do not depend on the quality of the scores."""
    by_error: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for row, kind, value in seen.values:
        if isinstance(value, str):
            by_error[value].append((row, kind))
    fix = "Catch what can go wrong with a model's text and return 0.0, or None where the function does not apply."
    if seen.num_lost and runs_in != "process":
        fix += " Set `run_in: process`: in the trainer's own process it cannot be ended, and may hold the run."
    for error, where in by_error.items():
        rows, kinds = [row for row, _ in where], [kind for _, kind in where]
        yield _finding("fails", Severity.ERROR, f"It {error}.", fix, rows, kinds)
    for error, rows in seen.group_errors.items():
        title = f"Completions that are fine one by one fail in one call: it {error}."
        fix = "A group is scored in one call; look for code that takes the number of completions for granted."
        yield _finding("fails", Severity.ERROR, title, fix, rows)
    if seen.num_lost >= _MAX_LOST:
        title = f"It took longer than its timeout_s, or ended its process, {seen.num_lost} times."
        yield _finding("fails", Severity.ERROR, title, "The rest was not tried.")
    if seen.changing:
        title = "The score of a completion changes from call to call, or with the other completions of a call."
        fix = (
            "Fine if it ranks within a group on purpose. Else fix its seed or temperature, or look for state: noise in the "
            "reward is noise in the advantage."
        )
        yield _finding("unstable", Severity.WARNING, title, fix, sorted(seen.changing))


def _values(seen: Observations, best: Mapping[str, ScoreByRow], asks_for_gold: bool) -> Iterator[Finding]:
    """Findings about the quality of the scores."""
    scored = [value for *_, value in seen.values if not isinstance(value, str)]
    numbers = [value for value in scored if value is not None]
    if not numbers:
        if scored:
            title = f"It returned None (not applicable) for all {len(scored)} completions."
            yield _finding("values", Severity.WARNING, title, "Check the column that says which rows it applies to.")
        return
    tolerance = _ROUNDING * _range(numbers)
    golds, wrongs = best.get(GOLD, {}), best.get(WRONG, {})
    is_blind = bool(wrongs) and all(abs(golds.get(row, 0.0) - value) <= tolerance for row, value in wrongs.items())
    worst = Severity.ERROR if asks_for_gold and is_blind else Severity.WARNING
    if not tolerance and not golds:
        title = f"It gives every completion the same score ({numbers[0]:g}), but no right answer was among them."
        fix = "Name the column of right answers with --gold-column, or try a right completion in a test of your own."
        yield _finding("values", Severity.NOTE, title, fix)
        return
    if not tolerance:
        fix = "Without a difference there is no advantage and nothing to learn; leave it out, or fix it."
        yield _finding("values", worst, f"It gives every completion the same score ({numbers[0]:g}).", fix)
        return
    without = sorted({row for row, kind, value in seen.values if kind == GOLD and value is None} - golds.keys())
    if without:
        title = "It returned None for the right answer, in every form."
        fix = "If it should apply to these rows, check their gold answers: it cannot read them."
        yield _finding("values", Severity.WARNING, title, fix, without)
    if not is_blind:
        yield from _comparisons(golds, best, tolerance)
        return
    title = "It does not tell right from wrong: another answer of the same shape gets the same score."
    fix = "Right for a format or length reward; give it a small weight next to one that judges the answer."
    if asks_for_gold:
        fix = "It asks for the gold column, so it should look at it; check what it compares."
    yield _finding("values", Severity.ERROR if asks_for_gold else Severity.NOTE, title, fix)


def _comparisons(golds: ScoreByRow, best: Mapping[str, ScoreByRow], tolerance: float) -> Iterator[Finding]:
    """Right answers that do not get the highest score, and other completions that get a part of it."""
    others = {kind: rows for kind, rows in best.items() if kind not in (GOLD, LONG)}
    floors = {row: min(rows[row] for rows in best.values() if row in rows) for row in golds}
    unrewarded = []
    for row, gold in golds.items():
        scored = [(kind, rows[row]) for kind, rows in others.items() if row in rows]
        if not scored:
            continue  # nothing to compare with
        kind, score = max(scored, key=lambda entry: entry[1])
        if score - gold > tolerance or gold - floors[row] <= tolerance:
            unrewarded.append((row, gold, kind, score))
    if unrewarded:
        row, gold, kind, score = max(unrewarded, key=lambda entry: entry[3] - entry[1])
        title = f"The right answer does not get the highest score: on row {row} it got {gold:g}, `{kind}` {score:g}."
        fix = "Look at the gold answers of these rows: they may be wrong, or in a form that the function cannot read."
        yield _finding("gold-too-low", Severity.ERROR, title, fix, [entry[0] for entry in unrewarded])
    for kind, rows in others.items():
        fractions = {
            row: (score - floors[row]) / (golds[row] - floors[row])
            for row, score in rows.items()
            if score > 0.0 and row in golds and golds[row] - floors[row] > tolerance
        }
        partly = [row for row, fraction in fractions.items() if fraction >= _PART]
        if not partly:
            continue
        fully = [row for row in partly if fractions[row] >= _FULL]
        if len(fully) > _BY_CHANCE * len(golds):
            severity = Severity.ERROR
            fix = "A policy finds this out quickly; make the function ask for the answer itself."
        else:
            severity, fix = Severity.WARNING, "Fine as partial credit; otherwise a policy may settle for it."
        row = max(partly, key=fractions.__getitem__)
        how = "as much as the right answer" if fully else f"{fractions[row]:.0%} of the right answer's score"
        title = f"It rewards `{kind}`: on row {row} it got {rows[row]:g}, {how}."
        yield _finding("pays", severity, title, fix, sorted(fully or partly))


def _finding(
    key: str, severity: Severity, title: str, fix: str, rows: Sequence[int] = (), kinds: Sequence[str] = ()
) -> Finding:
    distinct = list(dict.fromkeys(rows)), list(dict.fromkeys(kinds))
    return Finding(key=key, severity=severity, title=title, fix=fix, rows=distinct[0], inputs=distinct[1])
