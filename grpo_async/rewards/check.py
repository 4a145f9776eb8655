"""`check-reward`: one reward function on completions whose worth is known.

Every candidate of a row is scored alone, which shows what raises, hangs or is slow; then all of a row in one call, as a group in
training, which shows scores that depend on chance or on the other completions.

Worked example, gold "72": the right answer is tried as `72`, `\\boxed{72}`, `<answer>72</answer>` and as a code block, each with
and without thinking before it, and the best score counts: 1.0. "83", a wrong answer of the same shape, gets 0.0 in all these forms.
Garbage that gets 0.3 is paid 30 % of what the right answer gets, a warning; 0.95 on more than a quarter of the rows is an error.
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
from grpo_async.rewards.text import last_boxed

GOLD_COLUMNS = ("answer", "solution", "ground_truth", "target", "label")
GOLD, WRONG, LONG = "right answer", "wrong answer", "very long"
_PAID, _PAID_LIKE_GOLD = 0.1, 0.9  # fractions of what the right answer gets, above the lowest score of the row
_BY_CHANCE = 0.25  # of the rows: up to here garbage may be right by luck
_ROUNDING = 1e-3  # of the range of scores: smaller differences are those of batches of a reward model
_MAX_LOST = 4  # calls that cost a process; then the rest is not tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Lowest, mean and highest score of one kind of completion, over the rows."""

    lowest: float
    mean: float
    highest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardReport:
    """What came out for one reward function. Times are seconds of a call with one completion."""

    name: str
    place: str
    num_calls: int
    num_failed: int
    scores: Mapping[str, Scores]  # by kind; of the forms of an answer the best one counts
    median_s: float
    longest_s: float
    findings: Sequence[Finding]  # the worst first

    @property
    def has_errors(self) -> bool:
        return any(finding.severity is Severity.ERROR for finding in self.findings)


def gold_of(prompt: Prompt, gold_column: str | None) -> str | None:
    """The right answer of a row as text: of `gold_column`, else of the first usual column that holds a text or number."""
    for name in GOLD_COLUMNS if gold_column is None else (gold_column,):
        value = prompt.columns.get(name)
        if isinstance(value, (str, int, float)) and str(value).strip():
            return str(value).strip()
    return None


def candidates(prompt: Prompt, gold: str | None) -> list[tuple[str, str]]:
    """(kind, text) of the completions that are tried for a row."""
    found = []
    if gold is not None:
        final = last_boxed(gold) or gold.rpartition("####")[2].strip() or gold  # of a whole solution
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
        ("counting", " ".join(str(number) for number in range(101))),
        ("odd characters", "\x00\x1b\u202e👍🏽" * 20 + "9^{9^{9^{9}}}" + "\\boxed{" * 100),
        (LONG, "so it goes on and on " * 10_000),
    ]


def _forms(answer: str) -> list[str]:
    plain = [answer, f"\\boxed{{{answer}}}", f"<answer>{answer}</answer>", f"```python\n{answer}\n```"]
    return [*plain, *(f"<think>Let me see.</think>\n{text}" for text in plain)]


def _same_shape(text: str) -> str:
    """Other letters and digits: "72 km" -> "83 ln"; without any the text itself."""
    digits, letters = "0123456789", "abcdefghijklmnopqrstuvwxyz"
    shifted = "1234567891", letters[1:] + letters[0]
    return text.translate(str.maketrans(digits + letters + letters.upper(), "".join(shifted) + shifted[1].upper()))


@dataclass(slots=True, kw_only=True)
class Seen:
    """What was seen of one function. A `value` is a score, None (not applicable), or the text of an error."""

    values: list[tuple[int, str, float | str | None, float]] = field(
        default_factory=list
    )  # (row, kind, value, seconds)
    unstable: set[int] = field(default_factory=set)  # rows with a score that changes from call to call
    dependent: set[int] = field(default_factory=set)  # rows with a score that depends on the others of its call
    group_errors: dict[str, list[int]] = field(
        default_factory=dict
    )  # of calls whose completions are fine alone -> rows
    num_lost: int = 0  # calls that took too long or ended their process


def check_reward(
    reward: RewardFunction,
    prompts: Sequence[Prompt],
    *,
    place: str,
    gold_column: str | None = None,
    slow_s: float = 1.0,
) -> RewardReport:
    """Check one reward function on some rows.

    Args:
        reward: the function; in a worker process, which can be killed, the check ends in bounded time whatever it does.
        prompts: rows; at least one.
        place: where it runs in training: event loop, thread, process.
        gold_column: the column of right answers; None = the first of the usual names that a row has.
        slow_s: a completion that takes longer is reported.
    """
    golds = [gold_of(prompt, gold_column) for prompt in prompts]
    seen = asyncio.run(_observe(reward, prompts, golds, slow_s))
    asks_for_gold = any(map(reward.names, (gold_column,) if gold_column else GOLD_COLUMNS))
    timeout_s = reward.timeout_s
    return report(seen, name=reward.name, place=place, timeout_s=timeout_s, slow_s=slow_s, asks_for_gold=asks_for_gold)


async def _observe(
    reward: RewardFunction, prompts: Sequence[Prompt], golds: Sequence[str | None], slow_s: float
) -> Seen:
    seen = Seen()

    async def call(row: int, texts: Sequence[str]) -> list[float | None] | str:
        prompt = prompts[row]
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

    async def alone(row: int, text: str) -> tuple[float | str | None, float]:
        began = time.perf_counter()
        values = await call(row, [text])
        return values if isinstance(values, str) else values[0], time.perf_counter() - began

    await alone(0, golds[0] or "1")  # imports and caches are not measured
    seen.num_lost = 0
    for row, prompt in enumerate(prompts):
        fine: dict[str, float | None] = {}  # as many as are fast enough for one call
        time_left_s = 0.5 * reward.timeout_s
        for kind, text in candidates(prompt, golds[row]):
            if seen.num_lost >= _MAX_LOST:
                return seen
            value, seconds = await alone(row, text)
            if seconds > slow_s and not isinstance(value, str):
                seconds = min(
                    seconds, (await alone(row, text))[1]
                )  # the first may have met a cold cache or a busy machine
            seen.values.append((row, kind, value, seconds))
            time_left_s -= seconds
            if not isinstance(value, str) and time_left_s > 0.0:
                fine[text] = value
        texts = list(reversed(fine))
        if len(texts) < 2:
            continue
        together = await call(row, texts)
        if isinstance(together, str):
            seen.group_errors.setdefault(together, []).append(row)
            continue
        tolerance = _ROUNDING * _range([value for value in fine.values() if value is not None])
        for text, value in zip(texts, together, strict=True):
            if not _is_same(value, fine[text], tolerance):
                again = [(await alone(row, text))[0] for _ in range(3)]
                is_stable = all(_is_same(each, fine[text], tolerance) for each in again)
                (seen.dependent if is_stable else seen.unstable).add(row)
    return seen


def _is_same(one: float | str | None, other: float | str | None, tolerance: float) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return abs(one - other) <= tolerance
    return one == other


def _range(values: Sequence[float]) -> float:
    return max(values, default=0.0) - min(values, default=0.0)


# -------------------------------------------------------------------------------------------------- what it means


def report(seen: Seen, *, name: str, place: str, timeout_s: float, slow_s: float, asks_for_gold: bool) -> RewardReport:
    """Scores and findings of what was seen of the function `name`, which runs in `place` (event loop, thread, process)."""
    best: dict[str, dict[int, float]] = defaultdict(dict)  # kind -> row -> score
    for row, kind, value, _ in seen.values:
        if isinstance(value, float):
            best[kind][row] = max(value, best[kind].get(row, value))
    limit_s = min(slow_s, 0.5 * timeout_s)
    findings = [*_faults(seen, place, timeout_s, limit_s), *_values(seen, best, asks_for_gold)]
    seconds = [entry[3] for entry in seen.values]
    return RewardReport(
        name=name,
        place=place,
        num_calls=len(seen.values),
        num_failed=sum(isinstance(entry[2], str) for entry in seen.values),
        scores={
            kind: Scores(lowest=min(rows.values()), mean=statistics.fmean(rows.values()), highest=max(rows.values()))
            for kind, rows in best.items()
        },
        median_s=statistics.median(seconds or [0.0]),
        longest_s=max(seconds, default=0.0),
        findings=worst_first(findings),
    )


def _faults(seen: Seen, place: str, timeout_s: float, slow_s: float) -> Iterator[Finding]:
    """What goes wrong whatever the scores are worth."""
    by_error: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for row, kind, value, _ in seen.values:
        if isinstance(value, str):
            by_error[value].append((row, kind))
    fix = "Catch what can go wrong with a model's text and return 0.0, or None where the function does not apply."
    if seen.num_lost and place != "process":
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
    if seen.unstable:
        title = "The same completion gets different scores from call to call."
        fix = (
            "Noise in the reward is noise in the advantage; fix its seed or temperature, or average several judgments."
        )
        yield _finding("unstable", Severity.WARNING, title, fix, sorted(seen.unstable))
    if seen.dependent:
        title = "The score of a completion depends on the other completions of the call."
        fix = "Fine if it ranks within a group on purpose; else look for state or for a mix-up of their order."
        yield _finding("unstable", Severity.WARNING, title, fix, sorted(seen.dependent))
    slow = [(s, row, kind) for row, kind, value, s in seen.values if s > slow_s and not isinstance(value, str)]
    if slow:
        seconds, _, kind = max(slow)
        fix = f"A group is scored in one call, so its completions share timeout_s = {timeout_s:g}."
        if place != "process":
            fix += " If it computes, it holds up the trainer's interpreter: set `run_in: process`."
        title = f"It is slow: `{kind}` took {seconds:.1f} s."
        yield _finding("slow", Severity.WARNING, title, fix, [row for _, row, _ in slow], [kind for *_, kind in slow])


def _values(seen: Seen, best: Mapping[str, Mapping[int, float]], asks_for_gold: bool) -> Iterator[Finding]:
    """What the scores are worth."""
    scored = [value for _, _, value, _ in seen.values if not isinstance(value, str)]
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
    if not tolerance:
        fix = "Without a difference there is no advantage and nothing to learn; leave it out, or fix it."
        yield _finding("values", worst, f"It gives every completion the same score ({numbers[0]:g}).", fix)
        return
    without = sorted({row for row, kind, value, _ in seen.values if kind == GOLD and value is None} - golds.keys())
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


def _comparisons(
    golds: Mapping[int, float], best: Mapping[str, Mapping[int, float]], tolerance: float
) -> Iterator[Finding]:
    """Right answers that do not get the most, and other completions that get something."""
    others = {kind: rows for kind, rows in best.items() if kind not in (GOLD, LONG)}
    floors = {row: min(rows[row] for rows in best.values() if row in rows) for row in golds}
    unrewarded = []
    for row, gold in golds.items():
        kind, score = max(((kind, rows.get(row, gold)) for kind, rows in others.items()), key=lambda entry: entry[1])
        if score - gold > tolerance or gold - floors[row] <= tolerance:
            unrewarded.append((row, gold, kind, score))
    if unrewarded:
        row, gold, kind, score = max(unrewarded, key=lambda entry: entry[3] - entry[1])
        title = f"The right answer does not get the most: on row {row} it got {gold:g}, `{kind}` {score:g}."
        fix = "Look at the gold answers of these rows: they may be wrong, or in a form that the function cannot read."
        yield _finding("gold-too-low", Severity.ERROR, title, fix, [entry[0] for entry in unrewarded])
    for kind, rows in others.items():
        paid = {
            row: (score - floors[row]) / (golds[row] - floors[row])
            for row, score in rows.items()
            if score > 0.0 and row in golds and golds[row] - floors[row] > tolerance
        }
        paid = {row: fraction for row, fraction in paid.items() if fraction >= _PAID}
        if not paid:
            continue
        row = max(paid, key=lambda each: paid[each])
        like_gold = [each for each, fraction in paid.items() if fraction >= _PAID_LIKE_GOLD]
        severity, how = Severity.WARNING, "as much as the right answer" if like_gold else f"{paid[row]:.0%} of that"
        fix = "Fine as partial credit; else a policy may settle for it."
        if len(like_gold) > _BY_CHANCE * len(golds):
            severity, fix = (
                Severity.ERROR,
                "A policy finds this out quickly; make the function ask for the answer itself.",
            )
        title = f"It pays `{kind}`: on row {row} it got {rows[row]:g}, {how}."
        yield _finding("pays", severity, title, fix, sorted(like_gold or paid))


def _finding(
    key: str, severity: Severity, title: str, fix: str, rows: Sequence[int] = (), kinds: Sequence[str] = ()
) -> Finding:
    distinct = list(dict.fromkeys(rows)), list(dict.fromkeys(kinds))
    return Finding(key=key, severity=severity, title=title, fix=fix, rows=distinct[0], inputs=distinct[1])
