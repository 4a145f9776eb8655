"""Makes rollouts with a function of the user, which has TRL's signature:

    rollout_func(prompts, trainer) -> {"prompt_ids": ..., "completion_ids": ..., "logprobs": ..., **extra}

Each value has one entry per rollout. Extra keys reach the reward functions as columns; `env_mask` (0: not sampled) becomes the
loss mask. Groups that are admitted together go into one call, in a thread; its tokens are stamped with the version served when it
began. A call that nobody waits for anymore sends no more requests: its `trainer` is closed.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from grpo_async.buffer.group import OpenGroup
from grpo_async.errors import DeadlineError, FatalRolloutError, RunError
from grpo_async.inference.sampling import find_stop
from grpo_async.records import (
    FinishReason,
    FloatArray,
    IntArray,
    Origin,
    RolloutCompletion,
    RolloutStatus,
    TaggedMessage,
    TurnRecord,
)
from grpo_async.rollout.function_trainer import FunctionSetup, FunctionTrainer
from grpo_async.tracking.timeline import span
from grpo_async.user_code.calls import Caller, CallError, UserCall, own_copy
from grpo_async.user_code.threads import ThreadRunner


class _Call:
    """One call of the function, for groups that started together; `task` has their completions by group id."""

    def __init__(self, make: Callable[[_Call], Coroutine[Any, Any, dict[int, list[RolloutCompletion]]]]) -> None:
        self.groups: list[OpenGroup] = []
        self.task = asyncio.create_task(make(self))  # begins after all that start in this turn of the loop have joined


class FunctionProducer:
    """See the module's docstring; implements rollout.group.GroupProducer."""

    def __init__(self, function: Callable[..., Any], setup: FunctionSetup) -> None:
        self._function = function
        self._setup = setup
        section = setup.section
        threads = ThreadRunner("rollout-function", max_threads=section.max_concurrent_calls)
        self._caller = Caller(threads, section.timeout_s)
        # decides when a call begins, and so its version; the limit of `threads` also counts calls that were cancelled and go on
        self._slots = asyncio.Semaphore(section.max_concurrent_calls)
        self._joining: _Call | None = None

    @asynccontextmanager
    async def produce(self, group: OpenGroup) -> AsyncIterator[None]:
        call = self._joining
        if call is None or len(call.groups) == self._setup.groups_per_call:
            call = self._joining = _Call(self._make)
        call.groups.append(group)
        try:
            made = await asyncio.shield(call.task)  # the call has a time limit
        except asyncio.CancelledError:
            call.groups.remove(group)
            if not call.groups:
                call.task.cancel()
                if self._joining is call:  # it had not begun
                    self._joining = None
            raise
        group.completions = made[group.group_id]
        for index, completion in enumerate(group.completions):
            if completion.oldest_version is not None:
                group.received(index, completion.num_sampled_tokens, completion.oldest_version)
        yield

    async def _make(self, call: _Call) -> dict[int, list[RolloutCompletion]]:
        """Call the function once for the groups that are still wanted when it begins."""
        if self._joining is call:
            self._joining = None
        async with self._slots:  # calls that hold slots have time limits
            groups = list(call.groups)
            version = groups[0].served_version()
            for group in groups:
                group.on_tokens(0, version)  # known now; the number of tokens only at the end
            trainer = FunctionTrainer(self._setup, seed=groups[0].seed, served_version=groups[0].served_version)
            try:
                completions = iter(await self._call(groups, trainer, version))
            finally:
                trainer.close()
        return {group.group_id: list(itertools.islice(completions, group.size)) for group in groups}

    async def _call(
        self, groups: Sequence[OpenGroup], trainer: FunctionTrainer, version: int
    ) -> list[RolloutCompletion]:
        # the function may modify its prompts
        prompts = [own_copy(group.prompt.as_given()) for group in groups for _ in range(group.size)]
        ids = [group.rollout_id(index) for group in groups for index in range(group.size)]
        began, started_at = time.monotonic(), time.time()
        call = UserCall(
            functools.partial(self._function, prompts, trainer),
            # in the thread, because a long list takes a while
            finish=lambda output: read_output(output, ids, self._setup, version=version, started_at=started_at),
        )
        try:
            with span("rollout function", groups=[group.name for group in groups], rollouts=len(ids)):
                completions = await self._caller.run(call)
        except CallError as error:
            if error.is_timeout:
                raise DeadlineError(
                    f"the rollout function to return {len(ids)} rollouts",
                    waited_s=self._setup.section.timeout_s,
                    setting="rollout_function.timeout_s",
                    hint=f"It {error.problem}.",
                ) from error
            if isinstance(error.error, Exception):
                raise error.error from error.error.__cause__
            raise RunError(f"the rollout function {error.problem}") from error.origin
        duration_s = time.monotonic() - began
        return [replace(completion, total_duration_s=duration_s) for completion in completions]


# -- reading the function's output

REQUIRED_KEYS = ("completion_ids", "logprobs", "prompt_ids")
_OPTIONAL_LISTS = ("env_mask", "logprob_token_ids")
_LOGPROBS = -100.0, 1e-3  # nothing that is sampled is less likely; rounding


def read_output(
    output: Any, rollout_ids: Sequence[str], setup: FunctionSetup, *, version: int, started_at: float
) -> list[RolloutCompletion]:
    """Convert the output to one completion per rollout, with all tokens stamped with `version`; the caller adds the duration."""
    if not isinstance(output, Mapping):
        raise FatalRolloutError(f"rollout_func must return a dict, got {type(output).__name__}")
    if missing := sorted(set(REQUIRED_KEYS) - output.keys()):
        raise FatalRolloutError(f"rollout_func must return keys {missing} in its output dict.")
    columns = {
        key: _per_rollout(key, value, len(rollout_ids))
        for key, value in output.items()
        if value is not None or key not in _OPTIONAL_LISTS
    }
    completions = []
    for index, rollout_id in enumerate(rollout_ids):
        row = {key: values[index] for key, values in columns.items()}
        try:
            completions.append(_completion(row, rollout_id, setup, version=version, started_at=started_at))
        except (TypeError, ValueError) as error:
            raise FatalRolloutError(f"rollout_func: rollout {index} of {len(rollout_ids)}: {error}") from error
    return completions


def _completion(
    row: dict[str, Any], rollout_id: str, setup: FunctionSetup, *, version: int, started_at: float
) -> RolloutCompletion:
    """One rollout. If it ends in no stop token, and its last sampled turn has no stop string, it counts as truncated."""
    settings, num_tokens = setup.settings, len(setup.renderer.tokenizer)
    prompt_ids, ids = (_tokens(row.pop(key), key, num_tokens) for key in ("prompt_ids", "completion_ids"))
    if not prompt_ids.size:
        raise ValueError("prompt_ids is empty; return the tokens that the first sampled one was sampled after")
    if len(prompt_ids) + len(ids) > settings.max_model_len:
        raise ValueError(
            f"prompt_ids and completion_ids have {len(prompt_ids)} + {len(ids)} tokens, inference.max_model_len is "
            f"{settings.max_model_len}"
        )
    mask = [bool(entry) for entry in _one_each(row.pop("env_mask", [1] * len(ids)), len(ids), "env_mask")]
    logprobs = _logprobs(row.pop("logprobs"), row.pop("logprob_token_ids", None), ids.tolist(), mask)
    text, has_stop = _text(ids.tolist(), mask, setup)
    is_whole = has_stop or (ids.size > 0 and ids[-1] in settings.stop_token_ids)
    message = TaggedMessage(role="assistant", content=text, origin=Origin.POLICY)  # of all turns, stored once
    # the first turn begins with the function's call; when the others began is unknown
    turns = [
        TurnRecord(
            output_ids=ids[begin:cut],
            output_logprobs=logprobs[begin:cut],
            policy_versions=np.full(cut - begin, version, np.int32),
            finish_reason=FinishReason.STOP if is_whole or end < len(ids) else FinishReason.LENGTH,
            messages=[message] if begin == 0 else [],
            tool_response_ids=ids[cut:end],
            started_at=started_at if begin == 0 else 0.0,
        )
        for begin, cut, end in turn_boundaries(mask)
    ]
    return RolloutCompletion(
        rollout_id=rollout_id,
        prompt_ids=prompt_ids,
        turns=turns,
        status=RolloutStatus.FINISHED if is_whole else RolloutStatus.TRUNCATED,
        reward_columns={key: own_copy(value) for key, value in row.items()},
        started_at=started_at,
    )


def _text(ids: list[int], mask: Sequence[bool], setup: FunctionSetup) -> tuple[str, bool]:
    """The text of a completion, and whether the last of its sampled turns has a stop string; where the completion ends with that
    turn, its text ends before the string. The strings that ended earlier turns stay in the text."""
    text = setup.renderer.completion_text(ids)
    if not ids or not setup.settings.stop:
        return text, False
    begin, cut, end = turn_boundaries(mask)[-1]
    last = setup.renderer.completion_text(ids[begin:cut])
    found = find_stop(last, setup.settings.stop)
    if found is not None and cut == end:
        text = text[: len(text) - (len(last) - found[0])]
    return text, found is not None


def turn_boundaries(mask: Sequence[int]) -> list[tuple[int, int, int]]:
    """Turns of a completion as (begin of the sampled tokens, their end, end of the tokens from elsewhere).

    [1, 1, 0, 1] -> [(0, 2, 3), (3, 4, 4)]; [0, 1] -> [(0, 0, 1), (1, 2, 2)].
    """
    begins = [index for index in range(len(mask)) if index == 0 or (mask[index] and not mask[index - 1])]
    return [(begin, begin + sum(mask[begin:end]), end) for begin, end in pairwise([*begins, len(mask)])]


def _entries(value: Any) -> list[Any] | None:
    """The entries of a list, tuple, tensor or array; None for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, list | tuple) else None


def _per_rollout(key: str, value: Any, count: int) -> Sequence[Any]:
    """One entry per rollout; an extra value that is no list is that of every rollout."""
    if _entries(value) is None and key not in (*REQUIRED_KEYS, *_OPTIONAL_LISTS):
        return [value] * count
    try:
        return _one_each(value, count, key, "rollouts")
    except ValueError as error:
        raise FatalRolloutError(f"rollout_func: {error}") from error


def _one_each(value: Any, count: int, what: str, of: str = "completion_ids") -> list[Any]:
    values = _entries(value)
    if values is None or len(values) != count:
        found = type(value).__name__ if values is None else f"{len(values)} entries"
        raise ValueError(f"{what} must be a list with one entry for each of {count} {of}; it is {found}")
    return values


def _tokens(value: Any, what: str, num_tokens: int) -> IntArray:
    ids = np.asarray(_entries(value))
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise ValueError(f"{what} must be a list of token ids")
    if ids.size and not (ids.min() >= 0 and ids.max() < num_tokens):
        raise ValueError(f"{what} has ids from {ids.min()} to {ids.max()}, but the model's are 0 to {num_tokens - 1}")
    return ids.astype(np.int32)


def _logprobs(value: Any, token_ids: Any, ids: Sequence[int], mask: Sequence[bool]) -> FloatArray:
    """One logprob per completion token; 0.0 where it was not sampled. An entry may be a number or a list (TRL's form), whose value
    for the sampled token in `logprob_token_ids` counts, or else the first."""
    values = _one_each(value, len(ids), "logprobs")
    names = [()] * len(ids) if token_ids is None else _one_each(token_ids, len(ids), "logprob_token_ids")
    picked = [
        _of_token(*entry) if is_sampled else 0.0
        for entry, is_sampled in zip(zip(values, ids, names, strict=True), mask, strict=True)
    ]
    logprobs = np.array(picked, np.float64)  # NaN for None
    wrong = np.flatnonzero(~((logprobs >= _LOGPROBS[0]) & (logprobs <= _LOGPROBS[1])))
    if wrong.size:
        raise ValueError(
            f"logprobs[{wrong[0]}] is {picked[wrong[0]]!r}; the natural logarithm of the probability of a token that was sampled "
            f"lies between {_LOGPROBS[0]:g} and 0 (not a probability or a logit)"
        )
    return logprobs.astype(np.float32)


def _of_token(entry: Any, token: int, names: Any) -> Any:
    if not isinstance(entry, list | tuple):
        return entry
    names = _entries(names) or []
    rank = names.index(token) if token in names else 0
    return entry[rank] if rank < len(entry) else None
