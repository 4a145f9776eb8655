"""Checks what a rollout function returned, and makes completions of it. Pure.

What is wrong raises FatalRolloutError, which is also the ValueError that users of TRL know: it names key, place and value.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from grpo_async.errors import FatalRolloutError
from grpo_async.inference.sampling import find_stop
from grpo_async.records import FinishReason, Origin, RolloutCompletion, RolloutStatus, TaggedMessage, TurnRecord
from grpo_async.rollout.function_trainer import FunctionSetup

REQUIRED_KEYS = ("completion_ids", "logprobs", "prompt_ids")
_OPTIONAL_LISTS = ("env_mask", "logprob_token_ids")
_MIN_LOGPROB = -100.0  # nothing that is sampled is less likely
_ROUNDING = 1e-3


def read_output(
    output: Any, rollout_ids: Sequence[str], setup: FunctionSetup, *, version: int, started_at: float
) -> list[RolloutCompletion]:
    """One completion per rollout, whose tokens are all stamped with `version`; how long it took is left to the caller. A
    completion that ends in no stop token, and whose text has no stop string, counts as truncated.

    Raises:
        FatalRolloutError: a key is missing, a list has not one entry per rollout, lengths of one rollout differ, an id is
            not one of the model's, a prompt is empty, a rollout is longer than the model takes, or the logprob of a sampled
            token is missing or not finite.
    """
    settings, num_tokens = setup.settings, len(setup.renderer.tokenizer)
    if not isinstance(output, Mapping):
        raise FatalRolloutError(f"rollout_func must return a dict, got {type(output).__name__}")
    missing = sorted(set(REQUIRED_KEYS) - output.keys())
    if missing:
        raise FatalRolloutError(f"rollout_func must return keys {missing} in its output dict.")
    columns = {key: _listed(key, value, len(rollout_ids)) for key, value in output.items()}
    required = {key: columns.pop(key) for key in REQUIRED_KEYS}
    masks, token_ids = (columns.pop(key, None) for key in _OPTIONAL_LISTS)
    completions = []
    for index, rollout_id in enumerate(rollout_ids):
        ids = _ids(required["completion_ids"][index], f"completion_ids[{index}]", num_tokens)
        prompt_ids = _ids(required["prompt_ids"][index], f"prompt_ids[{index}]", num_tokens)
        if not prompt_ids:
            raise FatalRolloutError(
                f"rollout_func: prompt_ids[{index}] is empty; return the tokens that the first sampled one was sampled after"
            )
        if len(prompt_ids) + len(ids) > settings.max_model_len:
            raise FatalRolloutError(
                f"rollout_func: prompt_ids[{index}] and completion_ids[{index}] have {len(prompt_ids)} + {len(ids)} "
                f"tokens, inference.max_model_len is {settings.max_model_len}"
            )
        mask = _mask(None if masks is None else masks[index], len(ids), index)
        names = None if token_ids is None else token_ids[index]
        logprobs = _logprobs(required["logprobs"][index], ids, mask, names, index)
        text = setup.renderer.completion_text(ids)
        is_whole = (bool(ids) and ids[-1] in settings.stop_token_ids) or bool(find_stop(text, settings.stop))
        completions.append(
            RolloutCompletion(
                rollout_id=rollout_id,
                prompt_ids=np.array(prompt_ids, np.int32),
                turns=_turns(
                    ids,
                    mask,
                    logprobs,
                    text=settings.shown(text),
                    is_whole=is_whole,
                    version=version,
                    started_at=started_at,
                ),
                status=RolloutStatus.FINISHED if is_whole else RolloutStatus.TRUNCATED,
                reward_columns={key: values[index] for key, values in columns.items()},
                started_at=started_at,
            )
        )
    return completions


def _ids(value: Any, where: str, num_tokens: int) -> list[int]:
    value = _plain_list(value)
    if value is None or not all(isinstance(token, Integral) for token in value):
        raise FatalRolloutError(f"rollout_func: {where} must be a list of token ids")
    ids = [int(token) for token in value]
    unknown = next((token for token in ids if not 0 <= token < num_tokens), None)
    if unknown is not None:
        raise FatalRolloutError(
            f"rollout_func: {where} holds {unknown}, but the model's tokens are 0 to {num_tokens - 1}"
        )
    return ids


def _turns(
    ids: list[int],
    mask: list[int],
    logprobs: list[float],
    *,
    text: str,
    is_whole: bool,
    version: int,
    started_at: float,
) -> list[TurnRecord]:
    """A turn ends where the mask goes from 0 to 1. The first begins with the call of the function; when the others did is not
    known. The text of the whole completion stands once."""
    message = TaggedMessage(role="assistant", content=text, origin=Origin.POLICY)
    return [
        TurnRecord(
            output_ids=np.array(ids[begin:cut], np.int32),
            output_logprobs=np.array(logprobs[begin:cut], np.float32),
            policy_versions=np.full(cut - begin, version, np.int32),
            finish_reason=FinishReason.STOP if is_whole or end < len(ids) else FinishReason.LENGTH,
            messages=[message] if begin == 0 else [],
            tool_response_ids=np.array(ids[cut:end], np.int32),
            started_at=started_at if begin == 0 else 0.0,
        )
        for begin, cut, end in turn_boundaries(mask)
    ]


def turn_boundaries(mask: Sequence[int]) -> list[tuple[int, int, int]]:
    """Turns of a completion as (begin of the sampled tokens, their end, end of the tokens from elsewhere).

    [1, 1, 0, 1] -> [(0, 2, 3), (3, 4, 4)]; [0, 1] -> [(0, 0, 1), (1, 2, 2)].
    """
    boundaries = []
    begin, length = 0, len(mask)
    while begin < length:
        cut = next((index for index in range(begin, length) if not mask[index]), length)
        end = next((index for index in range(cut, length) if mask[index]), length)
        boundaries.append((begin, cut, end))
        begin = end
    return boundaries


def _plain_list(value: Any) -> list[Any] | None:
    """Lists, tuples, tensors and arrays as a list; None for anything else."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return list(value) if isinstance(value, list | tuple) else None


def _listed(key: str, value: Any, count: int) -> Sequence[Any]:
    """One entry per rollout: a list as it is, anything else for every rollout."""
    values = _plain_list(value)
    if values is None:
        if key in (*REQUIRED_KEYS, *_OPTIONAL_LISTS):
            raise FatalRolloutError(
                f"rollout_func: {key} must be a list with one entry per rollout, got {type(value).__name__}"
            )
        return [value] * count
    if len(values) != count:
        raise FatalRolloutError(
            f"rollout_func: {key} has {len(values)} entries, expected {count}, one for each completion asked for"
        )
    return values


def _mask(value: Any, count: int, index: int) -> list[int]:
    if value is None:
        return [1] * count
    mask = _plain_list(value)
    if mask is None or len(mask) != count:
        raise FatalRolloutError(
            f"rollout_func: env_mask[{index}] has {'no' if mask is None else len(mask)} entries for {count} completion_ids; "
            "it needs one for each"
        )
    return [int(bool(entry)) for entry in mask]


def _logprobs(value: Any, ids: Sequence[int], mask: Sequence[int], token_ids: Any, index: int) -> list[float]:
    """One logprob per completion token; 0.0 where the mask is 0. An entry may be a number, or a list of the most likely ones:
    then the one that `logprob_token_ids` gives for the sampled token counts, or else the first (TRL's form)."""
    values = _plain_list(value)
    if values is None or len(values) != len(ids):
        raise FatalRolloutError(
            f"rollout_func: logprobs[{index}] has {'no' if values is None else len(values)} entries for {len(ids)} "
            "completion_ids; every token needs the logprob that it was sampled with"
        )
    checked = []
    for position, (entry, token, sampled) in enumerate(zip(values, ids, mask, strict=True)):
        if not sampled:
            checked.append(0.0)
            continue
        if isinstance(entry, list | tuple):
            names = [] if token_ids is None else list(token_ids[position])
            rank = names.index(token) if token in names else 0
            entry = entry[rank] if rank < len(entry) else None
        if not isinstance(entry, Real) or not math.isfinite(entry):
            raise FatalRolloutError(
                f"rollout_func: logprobs[{index}][{position}] is {entry!r}; a sampled token needs a finite number"
            )
        if not _MIN_LOGPROB <= float(entry) <= _ROUNDING:
            raise FatalRolloutError(
                f"rollout_func: logprobs[{index}][{position}] is {float(entry):g}; the natural logarithm of the probability of a "
                f"token that was sampled lies between {_MIN_LOGPROB:g} and 0 (not a probability or a logit)"
            )
        checked.append(float(entry))
    return checked
