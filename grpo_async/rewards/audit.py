"""Runs a reward function on the inputs of `fuzz` and notes what it does; `findings` says what that means.

Every case is scored alone, which shows what raises, hangs or takes long; then the cases of a row together, in another order and
some twice, as a group in training, which shows scores that depend on chance or on their neighbours. A time-out or an exception
is an observation, not the end. The function runs where its section says: event loop, thread or process.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from grpo_async.records import Prompt
from grpo_async.rewards.errors import RewardError, RewardTimeoutError
from grpo_async.rewards.findings import Observation, Observations
from grpo_async.rewards.function import RewardFunction
from grpo_async.rewards.fuzz import Case, find_gold_column, gold_text, make_cases
from grpo_async.user_code.threads import ThreadsExhaustedError

_MAX_TIMEOUTS = 2  # of one input, on different rows; then it is not tried again
_MAX_TIMEOUTS_IN_ALL = 8  # then the function is left alone
_NUM_AGAIN = 3  # calls that tell chance from neighbours
_ROUNDING = 1e-3  # of the range of a row: smaller differences are rounding (batches of a reward model)
_BEAT_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Sink:
    """Gets what happens as it happens, so that it is not lost with a process that must be killed."""

    trying: Callable[[int, str], None] = lambda row, name: None
    seen: Callable[[Observation], None] = lambda observation: None


def cases_of(prompts: Sequence[Prompt], *, gold_column: str | None, seed: int) -> list[list[Case]]:
    """The cases of each row; the wrong answers of a row are those of the next one."""
    golds = []
    for prompt in prompts:
        name = gold_column or find_gold_column(prompt.columns)
        golds.append(None if name is None else gold_text(prompt.columns.get(name)))
    return [
        make_cases(prompt, gold=gold, other_gold=golds[(row + 1) % len(golds)], seed=seed)
        for row, (prompt, gold) in enumerate(zip(prompts, golds, strict=True))
    ]


async def observe(
    reward: RewardFunction,
    prompts: Sequence[Prompt],
    rows: Sequence[Sequence[Case]],
    *,
    seed: int,
    slow_s: float,
    sink: Sink | None = None,
) -> Observations:
    """Score every case of every row, alone and together; each call is bounded by the function's `timeout_s`.

    A case that takes longer than `slow_s` is tried once more, and the shorter time counts.
    """
    return await _Run(reward, prompts, rows, seed=seed, slow_s=slow_s, sink=sink or Sink()).all()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Problem:
    text: str
    timed_out: bool


class _Run:
    """One function on all rows."""

    def __init__(
        self,
        reward: RewardFunction,
        prompts: Sequence[Prompt],
        rows: Sequence[Sequence[Case]],
        *,
        seed: int,
        slow_s: float,
        sink: Sink,
    ) -> None:
        self._reward, self._prompts, self._rows = reward, prompts, rows
        self._rng = random.Random(seed)
        self._slow_s = slow_s
        self._sink = sink
        self._singles: list[Observation] = []
        self._unstable: list[tuple[int, str]] = []
        self._leaking: list[tuple[int, str]] = []
        self._batch_errors: list[tuple[int, str]] = []
        self._stopped: str | None = None
        self._timeouts: Counter[str] = Counter()  # by the name of the input
        self._slow: set[str] = set()
        self._last_beat = self._longest_gap = 0.0
        self._heart: asyncio.TimerHandle | None = None

    async def all(self) -> Observations:
        self._beat()
        try:
            await self._score(
                0, self._rows[0][:1], "warming up"
            )  # imports, caches and worker processes are not measured
            for row, cases in enumerate(self._rows):
                for case in cases:
                    if self._stopped is None and self._timeouts[case.name] < _MAX_TIMEOUTS:
                        self._singles.append(await self._alone(row, case))
                        self._sink.seen(self._singles[-1])
                if self._stopped is None:
                    await self._together(row)
        finally:
            if self._heart is not None:
                self._heart.cancel()
        return Observations(
            singles=self._singles,
            unstable=self._unstable,
            leaking=self._leaking,
            batch_errors=self._batch_errors,
            stopped=self._stopped,
        )

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
        began, cpu = time.perf_counter(), time.process_time()
        self._last_beat, self._longest_gap = began, 0.0
        result = await self._score(row, [case], case.name)
        now = time.perf_counter()
        return Observation(
            row=row,
            case=case,
            value=None if isinstance(result, _Problem) else result[0],
            error=result.text if isinstance(result, _Problem) else None,
            timed_out=isinstance(result, _Problem) and result.timed_out,
            duration_s=now - began,
            cpu_s=time.process_time() - cpu,
            blocked_s=max(self._longest_gap, now - self._last_beat - _BEAT_S),
        )

    async def _together(self, row: int) -> None:
        """The cases of a row as one call, shuffled, some twice; what is too slow for that together stays out."""
        alone: dict[str, float | None] = {}
        cases: list[Case] = []
        time_left = 0.5 * self._reward.timeout_s
        for seen in sorted((one for one in self._singles if one.row == row), key=lambda one: one.duration_s):
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
            self._batch_errors.append((row, result.text))
            return
        numbers = [value for value in alone.values() if value is not None]
        tolerance = _ROUNDING * (max(numbers) - min(numbers)) if numbers else 0.0
        changed = {
            case.name: case
            for case, value in zip(group, result, strict=True)
            if not _same(value, alone[case.name], tolerance)
        }
        for name, case in changed.items():
            again = [await self._score(row, [case], name) for _ in range(_NUM_AGAIN)]
            is_stable = all(not isinstance(r, _Problem) and _same(r[0], alone[name], tolerance) for r in again)
            (self._leaking if is_stable else self._unstable).append((row, name))

    async def _score(self, row: int, cases: Sequence[Case], name: str) -> list[float | None] | _Problem:
        prompt, count = self._prompts[row], len(cases)
        self._sink.trying(row, name)
        try:
            outcome = await self._reward.score(
                [prompt.as_given()] * count,
                [case.completion for case in cases],
                [case.completion_ids for case in cases],
                {column: [value] * count for column, value in prompt.columns.items()},
            )
        except RewardError as error:
            if isinstance(error.__cause__, ThreadsExhaustedError):
                hangs = "hangs past its timeout_s in threads, which cannot be killed; set `run_in: process`"
                self._stopped = f"It {hangs}"
                return _Problem(text=hangs, timed_out=True)
            timed_out = isinstance(error, RewardTimeoutError)
            if timed_out:
                self._timeouts[name] += 1
                if self._timeouts.total() >= _MAX_TIMEOUTS_IN_ALL:
                    self._stopped = f"It took longer than its timeout_s {self._timeouts.total()} times"
            return _Problem(text=error.problem.splitlines()[0], timed_out=timed_out)
        return outcome.values

    def _beat(self) -> None:
        """Measures for how long the loop of the reward stands still: a timer that winds itself up."""
        self._reward.on_its_loop(self._felt)
        self._heart = asyncio.get_running_loop().call_later(_BEAT_S, self._beat)

    def _felt(self) -> None:
        now = time.perf_counter()
        self._longest_gap = max(self._longest_gap, now - self._last_beat - _BEAT_S)
        self._last_beat = now


def _same(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= tolerance
