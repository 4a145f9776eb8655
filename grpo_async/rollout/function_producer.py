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
from grpo_async.rollout.function_output import OutputReader
from grpo_async.rollout.function_trainer import FunctionTrainer
from grpo_async.rollout.producer import GroupRequest, Produced
from grpo_async.tracking.timeline import NO_TIMELINE, Slots
from grpo_async.user_code.calls import Raised, TimedCaller, UserCall, is_async
from grpo_async.user_code.loop import BlockedLoopError, UserLoop
from grpo_async.user_code.threads import ThreadRunner

ASYNC_LOOP = UserLoop("async rollout function")
"""One for all calls, in training and in evaluation: an HTTP client that they share belongs to one loop."""


@dataclass(slots=True, eq=False, kw_only=True)
class _Waiting:
    """A group whose rollouts are to be made by the next call."""

    request: GroupRequest
    answer: asyncio.Future[list[RolloutCompletion]]


class FunctionProducer:
    """See the module's docstring; implements rollout.producer.GroupProducer.

    Args:
        function: the user's function, sync or async.
        make_trainer: makes what one call gets as `trainer`, from the seed of the call.
        section: how it is called.
        groups_per_call: most groups in one call.
        reader: checks what it returns.
        tracks: of the timeline; each call in progress has one.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        make_trainer: Callable[[int], FunctionTrainer],
        *,
        section: RolloutFunctionSection,
        groups_per_call: int,
        reader: OutputReader,
        tracks: Slots | None = None,
    ) -> None:
        self._tracks = NO_TIMELINE.slots("rollout") if tracks is None else tracks
        self._function = function
        self._make_trainer = make_trainer
        self._section = section
        self._groups_per_call = groups_per_call
        self._reader = reader
        threads = ThreadRunner("rollout-function", max_threads=section.max_concurrent_calls)
        self._caller = TimedCaller(threads, section.timeout_s, loop=ASYNC_LOOP)
        self._slots = asyncio.Semaphore(section.max_concurrent_calls)  # for async functions too
        self._waiting: list[_Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def produce(self, request: GroupRequest) -> AsyncIterator[Produced]:
        loop = asyncio.get_running_loop()
        waiting = _Waiting(request=request, answer=loop.create_future())
        if not self._waiting:
            loop.call_soon(self._call_waiting)  # after every group that starts in this turn of the loop has joined
        self._waiting.append(waiting)
        completions = await waiting.answer  # the call has a limit
        if request.on_tokens is not None:
            for index, completion in enumerate(completions):
                if completion.oldest_version is not None:
                    request.on_tokens(index, completion.num_sampled_tokens, completion.oldest_version)
        yield Produced(completions=completions)

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

    async def _answers(self, groups: Sequence[_Waiting]) -> list[list[RolloutCompletion]]:
        version = groups[0].request.served_version()
        sizes = [group.request.size for group in groups]
        repeats = sizes if self._section.repeat_prompts else [1] * len(groups)
        prompts = [
            copy.deepcopy(group.request.prompt.as_given())  # the function may change what it gets
            for group, times in zip(groups, repeats, strict=True)
            for _ in range(times)
        ]
        trainer = self._make_trainer(groups[0].request.seed)
        trainer.open(asyncio.get_running_loop(), has_async_caller=is_async(self._function))
        began, started_at = time.monotonic(), time.time()
        names = [group.request.name for group in groups]
        ids = [f"{name}-r{index}" for name, size in zip(names, sizes, strict=True) for index in range(size)]
        call = UserCall(
            functools.partial(self._function, prompts, trainer),
            # in the thread: a long list takes its time
            finish=lambda output: self._reader.read(output, ids, version=version, started_at=started_at),
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
        return [list(itertools.islice(completions, size)) for size in sizes]


def _give_up(call: asyncio.Task[None], groups: Sequence[_Waiting], _: asyncio.Future[Any]) -> None:
    """End a call when the last of its groups was cancelled."""
    if all(group.answer.cancelled() for group in groups):
        call.cancel()
