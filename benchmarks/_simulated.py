"""What a simulated run has in place of models: servers that take virtual seconds instead of computing, and what uses them.

worker -> SimulatedProducer -> SimulatedServer (slots, continuous batching, pauses)

Both sides are in one thread. The trainer's side is ordinary blocking code; where it would block, it lets the VirtualLoop run:

    run_for(s)     the trainer computes for s seconds: the loop runs meanwhile
    run_until_call the trainer waits: the loop runs until somebody calls `give_back`
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import random
import selectors
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import log
from typing import Any

import numpy as np

from grpo_async.buffer.group import OpenGroup
from grpo_async.buffer.group_table import GroupTable
from grpo_async.buffer.sample_buffer import SampleBuffer
from grpo_async.checks.speed import ServerSpeed
from grpo_async.records import (
    FinishReason,
    GroupStatus,
    RolloutCompletion,
    RolloutGroup,
    RolloutSample,
    RolloutStatus,
    ScoredGroup,
    TurnRecord,
)

_LENGTH = "simulated_length"


class StandstillError(RuntimeError):
    """Nothing will ever happen again: both sides wait for each other."""


class _Selector(selectors.SelectSelector):
    """Never blocks: it moves the clock to the next timer instead."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise StandstillError("no timer is set and nothing is ready")
        self.now += max(0.0, timeout)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose clock moves only when nothing is left to do: hours are over in a second, the same each time. Not for
    sockets, threads or processes, which have real time."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        self._failure: Mapping[str, Any] | None = None
        self._is_asked_for = False
        super().__init__(self._virtual)
        self.set_exception_handler(self._note_failure)

    def time(self) -> float:
        """Seconds since the loop was made."""
        return self._virtual.now

    def run_for(self, seconds: float) -> None:
        """Let this many seconds pass. Raises what a callback raised."""
        handle = self.call_later(seconds, self.stop)
        try:
            self._run()
        finally:
            handle.cancel()

    def run_until_call(self) -> None:
        """Run until `give_back` is called. Raises StandstillError, or what a callback raised."""
        self._is_asked_for = True
        try:
            self._run()
        finally:
            self._is_asked_for = False

    def give_back(self) -> None:
        """Let `run_until_call` return after what is ready now. It does not end `run_for`."""
        if self._is_asked_for:
            self.stop()

    def _run(self) -> None:
        self.run_forever()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure.get("exception") or RuntimeError(failure["message"])

    def _note_failure(self, loop: asyncio.AbstractEventLoop, context: Mapping[str, Any]) -> None:
        self._failure = self._failure or context
        self.stop()


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The length of completions in tokens: lognormal with this mean and sigma, at most `longest`; sigma 0: always the mean."""

    mean: int
    sigma: float
    longest: int

    def draw(self, seed: int) -> int:
        """The same for the same seed. Mean 2000, sigma 1: half are below 1213, one in a hundred above 12400."""
        if self.sigma == 0.0:
            return self.mean
        value = random.Random(seed).lognormvariate(log(self.mean) - self.sigma**2 / 2, self.sigma)
        return max(1, min(self.longest, round(value)))


@dataclass(order=True, slots=True)
class _Row:
    ends_at: float  # in decode steps of its server
    number: int
    done: asyncio.Future[None] = field(compare=False)
    began_at: float = field(compare=False)


class SimulatedServer:
    """Continuous batching: every row gains a token in every decode step, which takes longer the more rows there are.

    Attributes:
        busy_s: seconds in which it was generating, until its last change.
        stalled_s: seconds from pauses until its rows continued.
        slot_s: seconds of its used slots, added up, while it generated.
        load: its requests, with a slot or waiting for one.
    """

    def __init__(self, loop: VirtualLoop, speed: ServerSpeed) -> None:
        self._loop, self._speed = loop, speed
        self._slots = asyncio.Semaphore(speed.slots)
        self._rows: list[_Row] = []  # a heap
        self._numbers = itertools.count()
        self._steps = 0.0  # decoded so far
        self._since = 0.0
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None
        self._resume_timer: asyncio.TimerHandle | None = None
        self._stopped_at = 0.0
        self.busy_s = self.stalled_s = self.slot_s = 0.0
        self.load = 0

    async def generate(self, length: int, on_start: Callable[[], None], on_cut: Callable[[int], None]) -> None:
        """Take a slot, then `length` decode steps. When it is cancelled, `on_cut` gets the number of tokens made so far."""
        self.load += 1
        try:
            async with self._slots:
                self.catch_up()
                row = _Row(self._steps + length, next(self._numbers), self._loop.create_future(), self._steps)
                on_start()
                heapq.heappush(self._rows, row)
                self._plan()
                try:
                    await row.done
                except asyncio.CancelledError:
                    self.catch_up()
                    on_cut(int(self._steps - row.began_at))
                    if row in self._rows:
                        self._rows.remove(row)
                        heapq.heapify(self._rows)
                    self._plan()
                    raise
        finally:
            self.load -= 1

    def pause(self) -> None:
        """Rows stand still until `resume`."""
        self.catch_up()
        if self._resume_timer is not None:
            self._resume_timer.cancel()
        self._paused = True
        self._stopped_at = self._loop.time()
        self._plan()

    def resume(self) -> None:
        """Continue, once the keys and values of all rows are computed with the new weights."""
        tokens = sum(self._steps - row.began_at for row in self._rows)
        self._resume_timer = self._loop.call_later(tokens * self._speed.prefill_s, self._go_on)

    def _go_on(self) -> None:
        self.catch_up()
        self._paused = False
        self.stalled_s += self._loop.time() - self._stopped_at
        self._plan()

    def _decode_s(self) -> float:
        return self._speed.decode_s + len(self._rows) * self._speed.row_s

    def catch_up(self) -> None:
        """Count the time since the last change."""
        passed, self._since = self._loop.time() - self._since, self._loop.time()
        if self._rows and not self._paused:
            self._steps += passed / self._decode_s()
            self.busy_s += passed
            self.slot_s += passed * len(self._rows)

    def _plan(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if self._rows and not self._paused:
            left = max(0.0, self._rows[0].ends_at - self._steps)
            self._timer = self._loop.call_later(left * self._decode_s(), self._finish)

    def _finish(self) -> None:
        self.catch_up()
        while self._rows and self._rows[0].ends_at <= self._steps + 1e-6:
            row = heapq.heappop(self._rows)
            if not row.done.done():
                row.done.set_result(None)
        self._plan()


class SimulatedProducer:
    """rollout.group.GroupProducer: each rollout goes to the server with the fewest requests."""

    def __init__(self, servers: Sequence[SimulatedServer], lengths: Lengths) -> None:
        self._servers, self._lengths = servers, lengths

    @asynccontextmanager
    async def produce(self, group: OpenGroup) -> AsyncIterator[None]:
        """See GroupProducer."""
        async with asyncio.TaskGroup() as tasks:
            rollouts = [tasks.create_task(self._rollout(group, index)) for index in range(group.size)]
        group.completions = [task.result() for task in rollouts]
        yield

    async def _rollout(self, group: OpenGroup, index: int) -> RolloutCompletion:
        length = self._lengths.draw(group.seed * 1000 + index)
        first: list[int] = []
        tell = group.received

        def on_start() -> None:
            first.append(group.served_version())
            tell(index, 1, first[0])

        def on_cut(made: int) -> None:
            tell(index, max(0, made - 1), first[0])

        server = min(self._servers, key=lambda each: each.load)
        await server.generate(length, on_start, on_cut)
        last = group.served_version()
        tell(index, length - 1, last)
        turn = TurnRecord(  # two tokens stand for all: the oldest and the newest
            output_ids=np.array([1, 2], np.int32),
            output_logprobs=np.array([-1.0, -1.0], np.float32),
            policy_versions=np.array([first[0], last], np.int32),
            finish_reason=FinishReason.STOP,
        )
        return RolloutCompletion(
            rollout_id=f"{group.name}-r{index}",
            prompt_ids=np.zeros(1, np.int32),
            turns=[turn],
            status=RolloutStatus.FINISHED,
            reward_columns={_LENGTH: length},
        )


def lengths_of(group: ScoredGroup) -> list[int]:
    """Simulated tokens of each completion."""
    return [completion.reward_columns[_LENGTH] for completion in group.group.completions]


class SimulatedScorer:
    """Scores at once. A fraction of the groups, drawn by their ids, has nothing to learn from."""

    def __init__(self, *, filtered: float, seed: int) -> None:
        self._filtered, self._seed = filtered, seed

    def set_step(self, step: int, epoch: float) -> None: ...

    async def score(self, group: RolloutGroup, environments: object = None) -> ScoredGroup:
        """See scoring.Scorer."""
        is_filtered = random.Random(self._seed * 1_000_003 + group.group_id).random() < self._filtered
        samples = []
        for completion in () if is_filtered else group.completions:
            (turn,) = completion.turns
            samples.append(
                RolloutSample(
                    group_id=group.group_id, rollout_id=completion.rollout_id, token_ids=turn.output_ids,
                    loss_mask=np.ones(2, bool), sampler_logprobs=turn.output_logprobs, policy_versions=turn.policy_versions,
                    advantage=1.0, rewards={}, reward=1.0, truncated=False,
                )
            )  # fmt: skip
        count = len(group.completions)
        rewards = [1.0] * count if is_filtered else [float(index % 2) for index in range(count)]
        return ScoredGroup(group=group, samples=samples, rewards=rewards, reward_parts=[{} for _ in range(count)])


class SimulatedStore:
    """Keeps nothing."""

    def stores(self, group_id: int, status: GroupStatus) -> bool:
        return False

    def append(self, *args: object, **kwargs: object) -> None: ...


def give_back_at(table: GroupTable, buffer: SampleBuffer, loop: VirtualLoop) -> None:
    """Return to the trainer, which may be waiting, when a group is scored or the run fails."""

    def telling(method: Callable[..., None]) -> Callable[..., None]:
        def call(*given: Any) -> None:
            method(*given)
            loop.give_back()

        return call

    table.score = telling(table.score)  # type: ignore[method-assign]
    buffer.fail = telling(buffer.fail)  # type: ignore[method-assign]
