"""Makes groups into lines of JSON.

    RolloutGroup + ScoredGroup + TokenStats... -> one line: {"schema", "seq", ..., "rollouts": [{...}, ...]}

Example: ids [5, 6, 90, 7] with the mask [1, 1, 0, 1] and entropies [0.5, 0.25, 1.0] of the trained tokens: the line has
"entropies": [0.5, 0.25, null, 1.0].

This runs in the thread of the store, in parallel with training: each rollout is made into text by itself, so the GIL is never held
for longer than one rollout takes, and numbers with a fraction go as float32 arrays, whose text is half as long as that of Python's
floats.
Whatever JSON cannot hold (a lone surrogate, integers above 64 bits, a user's own type) becomes text; NaN becomes null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

from grpo_async.records import (
    BoolArray,
    Branch,
    FloatArray,
    GroupStatus,
    IntArray,
    Prompt,
    RolloutCompletion,
    RolloutGroup,
    ScoredGroup,
    TokenPath,
    TokenStats,
    TurnRecord,
)
from grpo_async.store.schema import SCHEMA
from grpo_async.utils.safe_text import escape_surrogates, safe_repr

_OPTIONS = orjson.OPT_NON_STR_KEYS | orjson.OPT_SERIALIZE_NUMPY
SOURCE_COLUMN = "source_label"
"""The stored column that says which of several sources the prompt is of."""
_MAX_DEPTH = 100  # of a user's value; what is nested deeper, or holds itself, becomes its repr


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A group on its way to the disk. `scored` knows rewards and advantages, `stats` maps rollout ids to what the trainer found,
    `written_at` is in seconds since the epoch."""

    seq: int
    group: RolloutGroup
    status: GroupStatus
    step: int | None
    written_at: float
    scored: ScoredGroup | None = None
    stats: Mapping[str, TokenStats] = field(default_factory=dict)


def line_of(entry: Entry) -> bytes:
    """One line of JSON with its line feed.

    Raises:
        ValueError: stats that do not fit their rollout (see `check_stats`).
    """
    group = entry.group
    outcomes = _outcomes(entry.scored)
    source = group.prompt.source
    shared_ids = group.completions[0].prompt_ids if group.completions else None
    rollouts = [_dumps(_rollout(each, outcomes, entry.stats, shared_ids)) for each in group.completions]
    head = {
        "schema": SCHEMA,
        "seq": entry.seq,
        "group_id": group.group_id,
        "prompt_id": group.prompt.prompt_id,
        "step": entry.step,
        "status": entry.status,
        "written_at": entry.written_at,
        "prompt_hash": prompt_hash(group.prompt),
        "messages": group.prompt.messages,
        "columns": {**group.prompt.columns, **({} if source is None else {SOURCE_COLUMN: source})},
        "prompt_ids": shared_ids,
    }
    # joined by hand: what is a JSON object already would be copied once more
    return b"".join((_dumps(head)[:-1], b',"rollouts":[', b",".join(rollouts), b"]}\n"))


def check_stats(group: RolloutGroup, stats: Mapping[str, TokenStats]) -> None:
    """Check that the trainer's statistics fit the tokens of a group.

    Raises:
        ValueError: stats of a rollout, or of one of its branches, do not have one entry per token that the policy sampled.
    """
    paths = {completion.sample_id(path): path for completion in group.completions for path in completion.paths}
    for name, path in paths.items():
        found = stats.get(name)
        if found is None:
            continue
        lengths = {column.name: len(getattr(found, column.name)) for column in fields(found)}
        if set(lengths.values()) != {path.num_own_tokens}:
            raise ValueError(f"{name} has {path.num_own_tokens} sampled tokens; the trainer's stats have {lengths}")


def prompt_hash(prompt: Prompt) -> str:
    """16 hexadecimal digits that the same prompt has in every run: a hash of its messages. Where these are blank or only the system
    prompt, because an environment or an agent will write the others, its other columns are hashed too. The hash is exact, as the
    rollouts were made: data.identity.task_key leaves out case, spaces and the system prompt."""
    # not who wrote it: the system prompt of the config and that of the data read the same
    kept: list[Any] = [(m.role, m.content, m.tool_calls, m.name, m.tool_call_id) for m in prompt.messages]
    if not any(m.content.strip() or m.tool_calls for m in prompt.messages if m.role != "system"):
        kept.append(prompt.columns)
    return blake2b(_dumps(kept, orjson.OPT_SORT_KEYS), digest_size=8).hexdigest()


def _outcomes(scored: ScoredGroup | None) -> dict[str, dict[str, Any]]:
    """What scoring made of each rollout and branch, by its id."""
    found: dict[str, dict[str, Any]] = {}
    if scored is None:
        return found
    scores = zip(scored.group.trainable, scored.rewards, scored.reward_parts, strict=True)
    for index, (completion, reward, parts) in enumerate(scores):
        extra = {name: values[index] for name, values in scored.extra_columns.items()}
        found[completion.rollout_id] = {**_NOT_SCORED, "reward": reward, "rewards": parts, "extra": extra}
    for sample in scored.samples:
        trained = {"reward": sample.reward, "advantage": sample.advantage, "rewards": sample.rewards}
        found[sample.rollout_id] = {**found.get(sample.rollout_id, _NOT_SCORED), **trained}
    return found


_NOT_SCORED: Mapping[str, Any] = {"reward": None, "advantage": None, "rewards": {}, "extra": {}}


def _rollout(
    completion: RolloutCompletion,
    outcomes: Mapping[str, Mapping[str, Any]],
    stats: Mapping[str, TokenStats],
    shared_ids: IntArray | None,
) -> dict[str, Any]:
    """The JSON object of one rollout. `shared_ids` are the group's prompt ids, which it need not repeat."""
    ids, outcome = completion.prompt_ids, outcomes.get(completion.rollout_id, _NOT_SCORED)
    return {
        "rollout_id": completion.rollout_id,
        "status": completion.status,
        "truncated": completion.truncated,
        "done": completion.done,
        "error": completion.error,
        "rewards": outcome["rewards"],
        "started_at": completion.started_at,
        "total_duration_s": completion.total_duration_s,
        "reset_messages": completion.prompt_messages,
        "extra": {**completion.reward_columns, **outcome["extra"]},
        **_path(completion, outcome, stats.get(completion.rollout_id)),
        "num_tokens": completion.num_sampled_tokens,
        "prompt_ids": None if shared_ids is not None and np.array_equal(ids, shared_ids) else ids,
        "branches": [_branch(completion, branch, outcomes, stats) for branch in completion.branches],
    }


def _branch(
    completion: RolloutCompletion,
    branch: Branch,
    outcomes: Mapping[str, Mapping[str, Any]],
    stats: Mapping[str, TokenStats],
) -> dict[str, Any]:
    """The JSON object of one branch, with the fields of a rollout. Without a sample it has the reward that its agent named."""
    name = completion.sample_id(branch)
    outcome = outcomes.get(name, {**_NOT_SCORED, "reward": branch.reward})
    parent = completion if branch.parent == 0 else completion.branches[branch.parent - 1]
    return {
        "rollout_id": name,
        "parent": completion.sample_id(parent),
        "reset_messages": branch.prompt_messages,
        **_path(branch, outcome, stats.get(name)),
    }


def _path(path: TokenPath, outcome: Mapping[str, Any], stats: TokenStats | None) -> dict[str, Any]:
    """What a rollout and each of its branches have: messages, turns and tokens."""
    mask = path.completion_mask
    return {
        "num_tokens": path.num_own_tokens,
        "reward": outcome["reward"],
        "advantage": outcome["advantage"],
        "messages": path.completion_messages(),
        "turns": [_turn(turn) for turn in path.turns],
        "prompt_ids": path.prompt_ids,
        "completion_ids": path.completion_ids,
        "mask": mask.view(np.uint8),
        "logprobs": path.logprobs,
        "versions": path.policy_versions,
        **(_NO_STATS if stats is None else _stats(stats, mask)),
    }


_NO_STATS = dict.fromkeys(("trainer_logprobs", "proximal_logprobs", "weights", "entropies", "token_flags"))


def _stats(stats: TokenStats, mask: BoolArray) -> dict[str, Any]:
    """Lists of the length of the mask."""
    is_sampled = None if mask.all() else mask
    flags: Any = np.ascontiguousarray(stats.flags, dtype=np.uint8)
    if is_sampled is not None:
        rest = iter(flags.tolist())
        flags = [next(rest) if sampled else None for sampled in mask.tolist()]
    return {
        "trainer_logprobs": _aligned(stats.logprobs, is_sampled),
        "proximal_logprobs": _aligned(stats.proximal_logprobs, is_sampled),
        "weights": _aligned(stats.weights, is_sampled),
        "entropies": _aligned(stats.entropies, is_sampled),
        "token_flags": flags,
    }


def _aligned(values: Sequence[float], is_sampled: BoolArray | None) -> FloatArray:
    """One entry per completion token; NaN, in JSON null, where the mask is 0. `is_sampled` is the mask, None where it is 1
    everywhere."""
    found = np.ascontiguousarray(values, dtype=np.float32)
    if is_sampled is None:
        return found
    aligned = np.full(len(is_sampled), np.nan, dtype=np.float32)
    aligned[is_sampled] = found
    return aligned


def _turn(turn: TurnRecord) -> dict[str, Any]:
    return {
        "num_tokens": len(turn.output_ids),
        "finish_reason": turn.finish_reason,
        "stop_reason": turn.stop_reason,
        "generation_duration_s": turn.generation_duration_s,
        "tool_execution_duration_s": turn.tool_execution_duration_s,
        "parse_error": turn.parse_error,
        "started_at": turn.started_at,
        "tool_calls": turn.tool_calls,
    }


def _dumps(value: Any, option: int = 0) -> bytes:
    """JSON; with what it cannot hold made into text."""
    try:
        return orjson.dumps(value, default=safe_repr, option=_OPTIONS | option)
    except TypeError:  # orjson's encode error: an integer above 64 bits, a lone surrogate, an odd key
        return orjson.dumps(_storable(value), option=_OPTIONS | option)


def _storable(value: Any, depth: int = 0) -> Any:
    """`value`, with the repr of each part that JSON cannot hold: {"a": 2**70, "b": {2}} -> {"a": "1180...", "b": "{2}"}.
    A lone surrogate becomes its escape."""
    if isinstance(value, str):
        return escape_surrogates(value)
    if depth < _MAX_DEPTH:
        if is_dataclass(value) and not isinstance(value, type):
            value = {each.name: getattr(value, each.name) for each in fields(value)}
        if isinstance(value, Mapping):
            return {_storable(str(name)): _storable(each, depth + 1) for name, each in value.items()}
        if isinstance(value, (list, tuple)):
            return [_storable(each, depth + 1) for each in value]
    try:
        orjson.dumps(value, option=_OPTIONS)
    except TypeError:
        return _storable(safe_repr(value))
    return value
