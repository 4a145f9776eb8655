"""Runs a reward function on the inputs of `fuzz` and notes what it does; `audit_report` says what that means.

Every case is scored alone, which shows what raises, hangs or takes long; then the cases of a row together, in another order and
some twice, as a group in training, which shows scores that depend on chance or on their neighbors. A timeout, an exception or
the death of its process is an observation, not the end.

`audit_report.check_reward` gives the observer a function in one worker process (`workers`), wherever its section says: a function
that holds the interpreter (one long regular expression, one huge power) stops every time limit that is kept inside its process.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from grpo_async.records import Prompt
from grpo_async.rewards.call import RewardError, RewardTimeoutError, WorkerDiedError
from grpo_async.rewards.function import RewardFunction
from grpo_async.rewards.fuzz import Case

_MAX_LOST = 2  # calls of one input, on different rows, that cost a process; then it is not tried again
_MAX_LOST_IN_ALL = 8  # then the function is left alone
_NUM_AGAIN = 3  # calls that tell chance from neighbors
ROUNDING = 1e-3  # of the range of scores: smaller differences are rounding (batches of a reward model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """One case that was scored alone. With an `error` there is no value; a value of None is the function's own."""

    row: int
    case: Case
    value: float | None = None
    error: str | None = None
    is_lost: bool = False  # its process ended, or had to be ended in time
    duration_s: float = 0.0


@dataclass(slots=True, kw_only=True)
class Observations:
    """All that was seen of one reward function."""

    singles: list[Observation] = field(default_factory=list)
    unstable: list[tuple[int, str]] = field(default_factory=list)
    """(row, input) whose score changes from call to call."""
    leaking: list[tuple[int, str]] = field(default_factory=list)
    """(row, input) whose score depends on the other completions of the call."""
    batch_errors: list[tuple[int, str]] = field(default_factory=list)
    """(row, error) of calls with inputs that are fine alone."""
    stopped: str | None = None
    """Why the rest was not run."""


@dataclass(frozen=True, slots=True)
class _Problem:
    text: str
    is_lost: bool


class Observer:
    """One function on all rows; `all` runs it.

    Args:
        reward: the function; its `timeout_s` bounds every call.
        prompts: rows.
        rows: the cases of each.
        seed: of the order in which the cases of a row are scored together.
        slow_s: a case that takes longer is tried once more, and the shorter time counts.
        on_progress: called with (inputs done, inputs in all).
    """

    def __init__(
        self,
        reward: RewardFunction,
        prompts: Sequence[Prompt],
        rows: Sequence[Sequence[Case]],
        *,
        seed: int,
        slow_s: float,
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self._reward, self._prompts, self._rows = reward, prompts, rows
        self._rng = random.Random(seed)
        self._slow_s = slow_s
        self._on_progress = on_progress
        self._seen = Observations()
        self._lost: Counter[str] = Counter()  # by the name of the input
        self._slow: set[str] = set()

    async def all(self) -> Observations:
        """Score every case of every row, alone and together."""
        seen = self._seen
        total = sum(map(len, self._rows))
        await self._score(0, self._rows[0][:1], "warming up")  # imports, caches, worker processes are not measured
        for row, cases in enumerate(self._rows):
            for case in cases:
                if seen.stopped is None and self._lost[case.name] < _MAX_LOST:
                    seen.singles.append(await self._alone(row, case))
                    self._on_progress(len(seen.singles), total)
            if seen.stopped is None:
                await self._together(row)
        return seen

    async def _alone(self, row: int, case: Case) -> Observation:
        seen = await self._once(row, case)
        if seen.error is None and seen.duration_s > self._slow_s and case.name not in self._slow:
            again = await self._once(row, case)  # the first one may have met a cold cache or a busy machine
            if again.error is None and again.duration_s < seen.duration_s:
                seen = again
            if seen.duration_s > self._slow_s:
                self._slow.add(case.name)
        return seen

    async def _once(self, row: int, case: Case) -> Observation:
        began = time.perf_counter()
        result = await self._score(row, [case], case.name)
        duration_s = time.perf_counter() - began
        if isinstance(result, _Problem):
            return Observation(row=row, case=case, error=result.text, is_lost=result.is_lost, duration_s=duration_s)
        return Observation(row=row, case=case, value=result[0], duration_s=duration_s)

    async def _together(self, row: int) -> None:
        """The cases of a row as one call, shuffled, some twice; what is too slow for that together stays out."""
        alone: dict[str, float | None] = {}
        cases: list[Case] = []
        time_left = 0.5 * self._reward.timeout_s
        for seen in sorted((one for one in self._seen.singles if one.row == row), key=lambda one: one.duration_s):
            time_left -= seen.duration_s
            if seen.error is None and time_left > 0.0:
                alone[seen.case.name] = seen.value
                cases.append(seen.case)
        if len(cases) < 2:
            return
        group = [*cases, *cases[:3]]
        self._rng.shuffle(group)
        result = await self._score(row, group, "all inputs together")
        if isinstance(result, _Problem):
            self._seen.batch_errors.append((row, result.text))
            return
        numbers = [value for value in alone.values() if value is not None]
        tolerance = ROUNDING * (max(numbers) - min(numbers)) if numbers else 0.0
        changed = {
            case.name: case
            for case, value in zip(group, result, strict=True)
            if not _is_same(value, alone[case.name], tolerance)
        }
        for name, case in changed.items():
            again = [await self._score(row, [case], name) for _ in range(_NUM_AGAIN)]
            is_stable = all(not isinstance(r, _Problem) and _is_same(r[0], alone[name], tolerance) for r in again)
            (self._seen.leaking if is_stable else self._seen.unstable).append((row, name))

    async def _score(self, row: int, cases: Sequence[Case], name: str) -> list[float | None] | _Problem:
        prompt, count = self._prompts[row], len(cases)
        try:
            outcome = await self._reward.score(
                [prompt.as_given()] * count,
                [case.completion for case in cases],
                [case.completion_ids for case in cases],
                {column: [value] * count for column, value in prompt.columns.items()},
            )
        except RewardError as error:
            is_lost = isinstance(error, (RewardTimeoutError, WorkerDiedError))
            if is_lost:
                self._lost[name] += 1
                if self._lost.total() >= _MAX_LOST_IN_ALL:
                    self._seen.stopped = f"It took longer than its timeout_s, or died, {self._lost.total()} times"
            return _Problem(error.problem.splitlines()[0], is_lost)
        return outcome.values


def _is_same(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= tolerance
