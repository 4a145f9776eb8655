"""Rollouts made by a function of the user, with TRL's signature:

    rollout_func(prompts, trainer) -> {"prompt_ids": ..., "completion_ids": ..., "logprobs": ..., **extra}

Each value is a list with one entry per rollout. Extra keys reach the reward functions as columns; `env_mask` (1 = sampled by the
policy, 0 = from elsewhere) becomes the loss mask. The function runs in a thread (an async one on the event loop); groups that are
admitted together go into one call, and every token is stamped with the policy version that was served when the call began, the
oldest it can be.
"""

from __future__ import annotations

import asyncio
import copy
import inspect
import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from grpo_async.errors import DeadlineError, RolloutContractError
from grpo_async.records import FinishReason, Origin, RolloutCompletion, RolloutStatus, TaggedMessage, TurnRecord
from grpo_async.rollout.function_trainer import FunctionTrainer
from grpo_async.rollout.producer import GroupRequest, Produced
from grpo_async.threads import ThreadRunner

REQUIRED_KEYS = ("completion_ids", "logprobs", "prompt_ids")


@dataclass(frozen=True, slots=True, kw_only=True)
class FunctionLimits:
    """How the function is called; see RolloutFunctionSection."""

    repeat_prompts: bool
    groups_per_call: int
    max_concurrent_calls: int
    timeout_s: float


@dataclass(slots=True, eq=False)
class _Waiting:
    """A group whose rollouts are to be made by the next call."""

    request: GroupRequest
    answer: asyncio.Future[list[RolloutCompletion]]


class FunctionProducer:
    """See the module's docstring; implements rollout.producer.GroupProducer.

    Args:
        function: the user's function, sync or async.
        trainer: what it gets as `trainer`.
        decode: text of token ids, without special tokens.
        end_of_turn_ids: a completion that ends in none of these counts as truncated.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        trainer: FunctionTrainer,
        *,
        limits: FunctionLimits,
        decode: Callable[[Sequence[int]], str],
        end_of_turn_ids: Sequence[int],
    ) -> None:
        self._function = function
        self._trainer = trainer
        self._limits = limits
        self._decode = decode
        self._end_of_turn_ids = frozenset(end_of_turn_ids)
        self._threads = ThreadRunner("rollout-function", max_threads=limits.max_concurrent_calls)
        self._slots = asyncio.Semaphore(limits.max_concurrent_calls)
        self._waiting: list[_Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def produce(self, request: GroupRequest) -> AsyncIterator[Produced]:
        loop = asyncio.get_running_loop()
        self._trainer.use_loop(loop)
        waiting = _Waiting(request=request, answer=loop.create_future())
        if not self._waiting:
            loop.call_soon(self._call_waiting)  # after every group that starts in this turn of the loop has joined
        self._waiting.append(waiting)
        completions = await waiting.answer
        if request.on_tokens is not None:
            for index, completion in enumerate(completions):
                if completion.num_sampled_tokens:
                    request.on_tokens(index, completion.num_sampled_tokens, completion.oldest_version or 0)
        yield Produced(completions=completions)

    def _call_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for begin in range(0, len(waiting), self._limits.groups_per_call):
            task = asyncio.create_task(self._call(waiting[begin : begin + self._limits.groups_per_call]))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    async def _call(self, groups: Sequence[_Waiting]) -> None:
        """One call of the function for some groups; its outcome goes to whoever waits for them."""
        try:
            async with self._slots:
                groups = [group for group in groups if not group.answer.done()]  # cancelled while they waited
                if not groups:
                    return
                version = groups[0].request.served_version()
                answers = self._completions(groups, await self._answer(groups), version)
        except asyncio.CancelledError:
            for group in groups:
                group.answer.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - goes to the groups, which count it
            for group in groups:
                if not group.answer.done():
                    group.answer.set_exception(error)
            return
        for group, completions in zip(groups, answers, strict=True):
            if not group.answer.done():
                group.answer.set_result(completions)

    async def _answer(self, groups: Sequence[_Waiting]) -> Any:
        prompts = [
            copy.deepcopy(group.request.prompt.as_given())  # the function may change what it gets
            for group in groups
            for _ in range(group.request.size if self._limits.repeat_prompts else 1)
        ]
        timeout_s = self._limits.timeout_s
        try:
            if inspect.iscoroutinefunction(self._function):
                return await asyncio.wait_for(self._function(prompts, self._trainer), timeout_s)
            outcome: tuple[Any, BaseException | None] = await self._threads.run(
                lambda: self._attempt(prompts), timeout_s
            )
        except TimeoutError as error:
            raise DeadlineError(
                f"the rollout function to return {len(prompts)} rollouts",
                waited_s=timeout_s,
                setting="rollout_function.timeout_s",
            ) from error
        result, failure = outcome
        if failure is not None:
            raise (
                failure if isinstance(failure, Exception) else RolloutContractError(f"rollout_func raised {failure!r}")
            )
        return result

    def _attempt(self, prompts: list[Any]) -> tuple[Any, BaseException | None]:
        try:
            return self._function(prompts, self._trainer), None
        except BaseException as error:  # noqa: BLE001 - travels as a value out of the thread
            return None, error

    def _completions(self, groups: Sequence[_Waiting], output: Any, version: int) -> list[list[RolloutCompletion]]:
        sizes = [group.request.size for group in groups]
        rows = checked_output(output, sum(sizes))
        answers: list[list[RolloutCompletion]] = []
        for group, size in zip(groups, sizes, strict=True):
            mine, rows = rows[:size], rows[size:]
            answers.append([self._completion(group.request, index, row, version) for index, row in enumerate(mine)])
        return answers

    def _completion(self, request: GroupRequest, index: int, row: Mapping[str, Any], version: int) -> RolloutCompletion:
        ids, mask = row["completion_ids"], row["env_mask"]
        is_whole = bool(ids) and ids[-1] in self._end_of_turn_ids
        finish_reason = FinishReason.STOP if is_whole else FinishReason.LENGTH
        message = TaggedMessage(role="assistant", content=self._decode(ids), origin=Origin.POLICY)
        turns = [
            TurnRecord(
                output_ids=ids[begin:cut],
                output_logprobs=row["logprobs"][begin:cut],
                policy_versions=[version] * (cut - begin),
                finish_reason=finish_reason if end == len(ids) else FinishReason.STOP,
                messages=[message] if begin == 0 else [],  # the text of the whole completion stands once
                tool_response_ids=ids[cut:end],
            )
            for begin, cut, end in turn_borders(mask)
        ]
        return RolloutCompletion(
            rollout_id=f"{request.name}-r{index}",
            prompt_ids=row["prompt_ids"],
            turns=turns,
            status=RolloutStatus.FINISHED if is_whole else RolloutStatus.TRUNCATED,
            truncated=not is_whole,
            reward_columns=row["extra"],
        )


def turn_borders(mask: Sequence[int]) -> list[tuple[int, int, int]]:
    """Turns of a completion as (begin of the sampled tokens, their end, end of the tokens from elsewhere).

    [1, 1, 0, 1] -> [(0, 2, 3), (3, 4, 4)]; [0, 1] -> [(0, 0, 1), (1, 2, 2)].
    """
    borders = []
    begin = 0
    while begin < len(mask):
        cut = begin
        while cut < len(mask) and mask[cut]:
            cut += 1
        end = cut
        while end < len(mask) and not mask[end]:
            end += 1
        borders.append((begin, cut, end))
        begin = end
    return borders


def checked_output(output: Any, count: int) -> list[dict[str, Any]]:
    """What a rollout function returned, as one dict per rollout: prompt_ids, completion_ids, logprobs, env_mask, extra.

    Raises:
        RolloutContractError: a key is missing, a list has not `count` entries, lengths of one rollout differ, or a logprob of a
            sampled token is missing or not finite.
    """
    if not isinstance(output, Mapping):
        raise RolloutContractError(f"rollout_func must return a dict, got {type(output).__name__}")
    missing = sorted(set(REQUIRED_KEYS) - output.keys())
    if missing:
        raise RolloutContractError(f"rollout_func must return keys {missing} in its output dict.")
    columns = {key: _listed(key, value, count) for key, value in output.items()}
    masks = columns.pop("env_mask", None)
    token_ids = columns.pop("logprob_token_ids", None)
    required = {key: columns.pop(key) for key in REQUIRED_KEYS}
    rows = []
    for index in range(count):
        ids = _ids(required["completion_ids"][index], f"completion_ids[{index}]")
        mask = [1] * len(ids) if masks is None else [int(bool(value)) for value in masks[index]]
        if len(mask) != len(ids):
            raise RolloutContractError(
                f"rollout_func: env_mask[{index}] has {len(mask)} entries for {len(ids)} completion_ids; it needs one for each"
            )
        rows.append(
            {
                "prompt_ids": _ids(required["prompt_ids"][index], f"prompt_ids[{index}]"),
                "completion_ids": ids,
                "env_mask": mask,
                "logprobs": _logprobs(
                    required["logprobs"][index], ids, mask, None if token_ids is None else token_ids[index], index
                ),
                "extra": {key: values[index] for key, values in columns.items()},
            }
        )
    return rows


def _listed(key: str, value: Any, count: int) -> Sequence[Any]:
    """One entry per rollout: a list as it is, anything else for every rollout."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not isinstance(value, list | tuple):
        if key in (*REQUIRED_KEYS, "env_mask", "logprob_token_ids"):
            raise RolloutContractError(
                f"rollout_func: {key} must be a list with one entry per rollout, got {type(value).__name__}"
            )
        return [value] * count
    if len(value) != count:
        raise RolloutContractError(
            f"rollout_func: {key} has {len(value)} entries, expected {count}, one for each completion asked for"
        )
    return value


def _ids(value: Any, where: str) -> list[int]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, list | tuple) or not all(isinstance(token, int) for token in value):
        raise RolloutContractError(f"rollout_func: {where} must be a list of token ids")
    return list(value)


def _logprobs(values: Any, ids: Sequence[int], mask: Sequence[int], token_ids: Any, index: int) -> list[float]:
    """One logprob per completion token; 0.0 where the mask is 0. An entry may be a number, or a list of the most likely ones:
    then the one that `logprob_token_ids` gives for the sampled token counts, or else the first (TRL's form)."""
    values = values.tolist() if hasattr(values, "tolist") else values
    if values is None or len(values) != len(ids):
        raise RolloutContractError(
            f"rollout_func: logprobs[{index}] has {'no' if values is None else len(values)} entries for {len(ids)} "
            "completion_ids; every token needs the logprob that it was sampled with"
        )
    checked = []
    for position, (value, token, sampled) in enumerate(zip(values, ids, mask, strict=True)):
        if not sampled:
            checked.append(0.0)
            continue
        if isinstance(value, list | tuple):
            names = [] if token_ids is None else list(token_ids[position])
            place = names.index(token) if token in names else 0
            value = value[place] if place < len(value) else None
        if not isinstance(value, int | float) or not math.isfinite(value):
            raise RolloutContractError(
                f"rollout_func: logprobs[{index}][{position}] is {value!r}; a sampled token needs a finite number"
            )
        checked.append(float(value))
    return checked
