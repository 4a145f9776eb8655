"""Rollouts made by a function of the user, with TRL's signature:

    rollout_func(prompts, trainer) -> {"prompt_ids": ..., "completion_ids": ..., "logprobs": ..., **extra}

Each value is a list with one entry per rollout. Extra keys reach the reward functions as columns; `env_mask` (1 = sampled by the
policy, 0 = from elsewhere) becomes the loss mask. The function runs in a thread (an async one on a separate loop, which it may
block without holding the run's). Groups that are admitted together go into one call, and every token is stamped with the policy
version that was served when the call began, the oldest it can be.

Invariant: a call that nobody waits for anymore (timeout, its groups cancelled, the run stops) sends nothing more: its `trainer`
is closed. The thread itself cannot be ended.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

from grpo_async.config.interaction_sections import RolloutFunctionSection
from grpo_async.errors import DeadlineError, RunError
from grpo_async.records import RolloutCompletion
from grpo_async.rollout.function_output import read_output
from grpo_async.rollout.function_trainer import FunctionSetup, FunctionTrainer
from grpo_async.rollout.group import OpenGroup
from grpo_async.tracking.timeline import NO_TIMELINE, Slots
from grpo_async.user_code.calls import Raised, TimedCaller, UserCall
from grpo_async.user_code.loop import BlockedLoopError, UserLoop
from grpo_async.user_code.threads import ThreadRunner

ASYNC_LOOP = UserLoop("async rollout function")
"""One for all calls, in training and in evaluation: an HTTP client that they share belongs to one loop."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiting:
    """A group whose rollouts are to be made by the next call."""

    group: OpenGroup
    answer: asyncio.Future[list[RolloutCompletion]]


class FunctionProducer:
    """See the module's docstring; implements rollout.group.GroupProducer.

    Args:
        function: the user's function, sync or async.
        setup: what its calls generate with.
        section: how it is called.
        groups_per_call: most groups in one call.
        tracks: of the timeline; each call in progress has one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        setup: FunctionSetup,
        *,
        section: RolloutFunctionSection,
        groups_per_call: int,
        tracks: Slots | None = None,
    ) -> None:
        self._tracks = NO_TIMELINE.slots("rollout") if tracks is None else tracks
        self._function = function
        self._setup = setup
        self._section = section
        self._groups_per_call = groups_per_call
        threads = ThreadRunner("rollout-function", max_threads=section.max_concurrent_calls)
        self._caller = TimedCaller(threads, section.timeout_s, loop=ASYNC_LOOP)
        self._slots = asyncio.Semaphore(section.max_concurrent_calls)  # for async functions too
        self._waiting: list[_Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def produce(self, group: OpenGroup) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(group=group, answer=loop.create_future())
        if not self._waiting:
            loop.call_soon(self._call_waiting)  # after every group that starts in this turn of the loop has joined
        self._waiting.append(waiting)
        group.completions = await waiting.answer  # the call has a limit
        for index, completion in enumerate(group.completions):
            if completion.oldest_version is not None:
                group.received(index, completion.num_sampled_tokens, completion.oldest_version)
        yield

    def _call_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for begin in range(0, len(waiting), self._groups_per_call):
            groups = waiting[begin : begin + self._groups_per_call]
            task = asyncio.create_task(self._call(groups))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
            for group in groups:
                group.answer.add_done_callback(functools.partial(_give_up, task, groups))

    async def _call(self, groups: Sequence[_Waiting]) -> None:
        """One call of the function for some groups; its outcome goes to whoever waits for them."""
        try:
            async with self._slots:  # for calls that have limits
                groups = [group for group in groups if not group.answer.done()]  # cancelled while they waited
                answers = await self._answers(groups) if groups else []
        except asyncio.CancelledError:
            for group in groups:
                group.answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - goes to the groups: one failure, which they all share
            for group in groups:
                if not group.answer.done():
                    group.answer.set_exception(error)
            return
        for group, completions in zip(groups, answers, strict=True):
            if not group.answer.done():
                group.answer.set_result(completions)

    async def _answers(self, waiting: Sequence[_Waiting]) -> list[list[RolloutCompletion]]:
        groups = [each.group for each in waiting]
        version = groups[0].served_version()
        prompts = [
            copy.deepcopy(group.prompt.as_given())  # the function may change what it gets
            for group in groups
            for _ in range(group.size if self._section.repeat_prompts else 1)
        ]
        trainer = FunctionTrainer(self._setup, seed=groups[0].seed, served_version=groups[0].served_version)
        began, started_at = time.monotonic(), time.time()
        names = [group.name for group in groups]
        ids = [f"{group.name}-r{index}" for group in groups for index in range(group.size)]
        call = UserCall(
            functools.partial(self._function, prompts, trainer),
            # in the thread: a long list takes its time
            finish=lambda output: read_output(output, ids, self._setup, version=version, started_at=started_at),
        )
        try:
            with self._tracks.span("rollout function", groups=names, rollouts=len(ids)):
                outcome = await self._caller.run(call)
        except TimeoutError as error:
            raise DeadlineError(
                f"the rollout function to return {len(ids)} rollouts",
                waited_s=self._section.timeout_s,
                setting="rollout_function.timeout_s",
                hint=f"It is blocking its event loop at {error.where}." if isinstance(error, BlockedLoopError) else "",
            ) from error
        finally:
            trainer.close()
        if isinstance(outcome, Raised):
            if isinstance(outcome.error, Exception):
                raise outcome.error
            raise RunError(f"the rollout function raised {outcome.summary}") from outcome.error
        duration_s = time.monotonic() - began
        completions = (replace(completion, total_duration_s=duration_s) for completion in outcome)
        return [list(itertools.islice(completions, group.size)) for group in groups]


def _give_up(call: asyncio.Task[None], groups: Sequence[_Waiting], _: asyncio.Future[Any]) -> None:
    """End a call when the last of its groups was cancelled."""
    if all(group.answer.cancelled() for group in groups):
        call.cancel()
