"""Runs a reward function on the inputs of `fuzz` and notes what it does; `audit_report` says what that means.

Every case is scored alone, which shows what raises, hangs or takes long; then the cases of a row together, in another order and
some twice, as a group in training, which shows scores that depend on chance or on their neighbours. A time-out or an exception
is an observation, not the end. The function runs where its section says: event loop, thread or process.

All of that happens in a process of its own: a function that holds the interpreter (one long regular expression, one huge power)
stops every time limit that is kept inside its process. There it is killed, and what was seen until then is kept.

    parent                                       child
    section, prompts, cases           ------>    loads the function, `Observer`
    Trying, Observation, ...          <------    as it happens
    Observations, or an error's text  <------    at the end
"""

from __future__ import annotations

import asyncio
import os
import pickle
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_async.config.interaction_sections import RewardSection
from grpo_async.errors import ConfigError, GrpoAsyncError
from grpo_async.records import Prompt
from grpo_async.rewards.call import RewardError, RewardTimeoutError
from grpo_async.rewards.function import RewardFunction, load_reward
from grpo_async.rewards.fuzz import Case
from grpo_async.rewards.workers import START_TIMEOUT_S, Owner, Worker
from grpo_async.user_code.threads import ThreadsExhaustedError
from grpo_async.utils.lifetime import die_with_parent

_MAX_TIMEOUTS = 2  # of one input, on different rows; then it is not tried again
_MAX_TIMEOUTS_IN_ALL = 8  # then the function is left alone
_NUM_AGAIN = 3  # calls that tell chance from neighbours
_ROUNDING = 1e-3  # of the range of a row: smaller differences are rounding (batches of a reward model)
_GRACE_S = 10.0  # beyond the function's own time limit


@dataclass(frozen=True, slots=True)
class Trying:
    """The call that comes next."""

    row: int
    name: str


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
    timed_out: bool


class Observer:
    """One function on all rows; `all` runs it.

    Args:
        reward: the function; its `timeout_s` bounds every call.
        prompts: rows.
        rows: the cases of each.
        seed: of the order in which the cases of a row are scored together.
        slow_s: a case that takes longer is tried once more, and the shorter time counts.
        tell: gets every Trying and Observation as it happens, so that it is not lost with a process that must be killed.
    """

    def __init__(
        self,
        reward: RewardFunction,
        prompts: Sequence[Prompt],
        rows: Sequence[Sequence[Case]],
        *,
        seed: int,
        slow_s: float,
        tell: Callable[[Trying | Observation], None] = lambda event: None,
    ) -> None:
        self._reward, self._prompts, self._rows = reward, prompts, rows
        self._rng = random.Random(seed)
        self._slow_s = slow_s
        self._tell = tell
        self._seen = Observations()
        self._timeouts: Counter[str] = Counter()  # by the name of the input
        self._slow: set[str] = set()

    async def all(self) -> Observations:
        """Score every case of every row, alone and together."""
        seen = self._seen
        await self._score(0, self._rows[0][:1], "warming up")  # imports, caches, worker processes are not measured
        for row, cases in enumerate(self._rows):
            for case in cases:
                if seen.stopped is None and self._timeouts[case.name] < _MAX_TIMEOUTS:
                    seen.singles.append(await self._alone(row, case))
                    self._tell(seen.singles[-1])
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
        began, cpu = time.perf_counter(), time.process_time()
        result = await self._score(row, [case], case.name)
        duration_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        if isinstance(result, _Problem):
            return Observation(
                row=row, case=case, error=result.text, timed_out=result.timed_out, duration_s=duration_s, cpu_s=cpu_s
            )
        return Observation(row=row, case=case, value=result[0], duration_s=duration_s, cpu_s=cpu_s)

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
        tolerance = _ROUNDING * (max(numbers) - min(numbers)) if numbers else 0.0
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
        self._tell(Trying(row, name))
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
                self._seen.stopped = f"It {hangs}"
                return _Problem(hangs, timed_out=True)
            timed_out = isinstance(error, RewardTimeoutError)
            if timed_out:
                self._timeouts[name] += 1
                if self._timeouts.total() >= _MAX_TIMEOUTS_IN_ALL:
                    self._seen.stopped = f"It took longer than its timeout_s {self._timeouts.total()} times"
            return _Problem(error.problem.splitlines()[0], timed_out)
        return outcome.values


def _is_same(one: float | None, other: float | None, tolerance: float) -> bool:
    if one is None or other is None:
        return one is other
    return abs(one - other) <= tolerance


# --------------------------------------------------------------------------------------------- in a process of its own


def observe_in_process(
    section: RewardSection,
    path: str,
    prompts: Sequence[Prompt],
    rows: Sequence[Sequence[Case]],
    *,
    seed: int,
    slow_s: float,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Observations:
    """What an Observer saw; with `stopped` set if its process had to be killed or died.

    Raises:
        ConfigError: the function cannot be loaded there, or a column cannot be pickled.
    """
    try:
        order = pickle.dumps((section.model_dump(mode="json"), path, prompts, rows, seed, slow_s))
    except Exception as error:
        raise ConfigError(
            f"{path}: a column cannot be sent to the process that checks the function: {error}"
        ) from error
    return asyncio.run(_follow(order, section, sum(len(cases) for cases in rows), on_progress))


async def _follow(
    order: bytes, section: RewardSection, total: int, on_progress: Callable[[int, int], None]
) -> Observations:
    singles: list[Observation] = []
    where = "While it was imported, it"
    limit_s = section.timeout_s + _GRACE_S
    worker = Worker(section.function, module=__name__)
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            await worker.wait_until_ready()
            await worker.send(order)
        while True:
            starts = where.startswith("While") or section.run_in == "process"
            async with asyncio.timeout(limit_s + (START_TIMEOUT_S if starts else 0.0)):
                message = pickle.loads(await worker.receive())
            if isinstance(message, Trying):
                where = f"With `{message.name}` on row {message.row} it"
            elif isinstance(message, Observation):
                singles.append(message)
                on_progress(len(singles), total)
            elif isinstance(message, Observations):
                return message
            else:
                raise ConfigError(message)
    except TimeoutError:
        why = (
            f"did not come back within {limit_s:.0f} s and had to be killed: it holds the interpreter or the event loop, so no "
            "time limit can end it and in training everything would stand still; set `run_in: process`"
        )
        return Observations(singles=singles, stopped=f"{where} {why}")
    except (EOFError, OSError):
        return Observations(singles=singles, stopped=f"{where} ended its process (exit {worker.reap()})")
    finally:
        worker.kill()


def main(descriptor: int, reference: str) -> None:
    """The child. What functions print goes to stderr: the parent's stdout is the report."""
    die_with_parent()
    os.dup2(2, 1)
    owner = Owner(descriptor)
    owner.send()
    section, path, prompts, rows, seed, slow_s = pickle.loads(owner.receive())

    def send(message: Any) -> None:
        owner.send(pickle.dumps(message))

    try:
        # one worker: there is one call at a time, and the start of a second would be taken for a slow call
        reward = load_reward(RewardSection.model_validate(section), path, num_workers=1)
    except GrpoAsyncError as error:
        send(f"{reference}: {error}")
        return
    try:
        seen = asyncio.run(Observer(reward, prompts, rows, seed=seed, slow_s=slow_s, tell=send).all())
    finally:
        reward.close()
    send(seen)
