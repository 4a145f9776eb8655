"""The rollout side's part of a checkpoint: a snapshot, and its JSON lines.

    prompts to issue again | groups that are finished and not trained | rollouts in progress

Step 3 was trained; group 8 is queued, group 9 has a rollout that is over and one in its second turn, group 10 waits for its first
token: `queued` [8], `in_progress` [9], `outstanding` [8, 9, 10]. A resume queues 8, continues 9 and restarts 10, with their ids and
seeds. Prompts are not written: the stream issues them again."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

import numpy as np

from grpo_async.records import (
    TOP,
    Branch,
    FinishReason,
    FloatArray,
    IntArray,
    Origin,
    Prompt,
    RolloutCompletion,
    RolloutGroup,
    RolloutSample,
    RolloutStatus,
    ScoredGroup,
    TaggedMessage,
    TokenPath,
    ToolCallRecord,
    TopArray,
    TurnRecord,
    as_arrays,
    no_tokens,
    oldest_of,
    top_array,
)
from grpo_async.utils.safe_text import safe_repr


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PartialRollout(TokenPath):
    """A rollout in progress. `open_ids`, `open_logprobs` and `open_versions` have equal length: the tokens of the turn that is
    being generated. `open_finish` is set when that turn is complete but what follows it (a tool's answer) is not there yet."""

    rollout_id: str
    prompt_ids: IntArray
    turns: Sequence[TurnRecord] = ()
    open_ids: IntArray = field(default_factory=no_tokens)
    open_logprobs: FloatArray = field(default_factory=lambda: np.empty(0, np.float32))
    open_versions: IntArray = field(default_factory=no_tokens)
    open_top: TopArray | None = None
    open_finish: FinishReason | None = None
    open_stop_reason: str | None = None

    def __post_init__(self) -> None:
        as_arrays(self, prompt_ids=np.int32, open_ids=np.int32, open_logprobs=np.float32, open_versions=np.int32)

    @property
    def num_sampled_tokens(self) -> int:
        return self.num_own_tokens + len(self.open_ids)

    @property
    def oldest_version(self) -> int | None:
        return oldest_of([*(turn.policy_versions for turn in self.turns), self.open_versions])


RolloutSnapshot = RolloutCompletion | PartialRollout
"""A rollout of a group in progress that is over, or has tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSnapshot:
    """Rollouts of one group, by index. Rollouts that have nothing yet are left out."""

    group_id: int
    rollouts: Mapping[int, RolloutSnapshot]

    @property
    def oldest_version(self) -> int | None:
        return min((v for each in self.rollouts.values() if (v := each.oldest_version) is not None), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """The rollout side at one instant.

    Attributes:
        data: cursor of the prompt stream.
        outstanding: prompts that were issued and are not closed, ascending; includes those of `queued` and `in_progress`.
        ledger: totals of closed groups.
        dropped: filtered and stale groups whose rewards the metrics of the next step will include; they are already stored.
        next_seq: the rollout store's number for the next group.
        failures: the error log's counts."""

    data: Mapping[str, Any]
    outstanding: Sequence[int]
    ledger: Mapping[str, Mapping[str, int]]
    queued: Sequence[ScoredGroup] = ()
    in_progress: Sequence[GroupSnapshot] = ()
    dropped: Sequence[ScoredGroup] = ()
    next_seq: int | None = None
    failures: Mapping[str, int] = field(default_factory=dict)

    def with_top(self, num_top: int) -> ResumeState:
        """Without the groups that have another number of likeliest tokens for each of theirs, because `loss.score_centering` or
        `rollout.top_k` has changed since: their prompts are issued again."""

        def fits(top: TopArray | None, num_tokens: int) -> bool:
            return num_tokens == 0 or (0 if top is None else top.shape[1]) == num_top

        def is_kept(rollout: RolloutSnapshot) -> bool:
            turns = rollout.all_turns if isinstance(rollout, RolloutCompletion) else rollout.turns
            open_fits = isinstance(rollout, RolloutCompletion) or fits(rollout.open_top, len(rollout.open_ids))
            return open_fits and all(fits(turn.output_top, len(turn.output_ids)) for turn in turns)

        return replace(
            self,
            queued=[each for each in self.queued if all(fits(s.top, s.num_trained_tokens) for s in each.samples)],
            in_progress=[each for each in self.in_progress if all(map(is_kept, each.rollouts.values()))],
        )

    def small(self) -> dict[str, Any]:
        return {
            "data": dict(self.data),
            "outstanding": list(self.outstanding),
            "ledger": {kind: dict(counts) for kind, counts in self.ledger.items()},
            "next_seq": self.next_seq,
            "failures": dict(self.failures),
        }

    def lines(self) -> Iterator[str]:
        """The groups, one JSON line each, made one at a time: no thread is blocked longer than one takes."""
        for queued in self.queued:
            yield _line("queued", {"scored": queued})
        for group in self.in_progress:
            yield _line("in_progress", {"group_id": group.group_id, "rollouts": dict(group.rollouts)})
        for dropped in self.dropped:
            yield _line("dropped", {"scored": dropped})


def read_resume_state(
    small: Mapping[str, Any], lines: Sequence[str], prompt_of: Callable[[int], Prompt]
) -> ResumeState:
    """The inverse of `small` and `lines`. `prompt_of` gives a prompt by its id. Raises ValueError, KeyError or TypeError for
    other data."""
    queued: list[ScoredGroup] = []
    in_progress: list[GroupSnapshot] = []
    dropped: list[ScoredGroup] = []
    for line in lines:
        content = json.loads(line, object_hook=partial(_record_from, prompt_of))
        match content.pop("kind"):
            case "queued":
                queued.append(content["scored"])
            case "in_progress":
                rollouts = {int(index): each for index, each in content["rollouts"].items()}
                in_progress.append(GroupSnapshot(group_id=content["group_id"], rollouts=rollouts))
            case "dropped":
                dropped.append(content["scored"])
            case other:
                raise ValueError(f"a line of kind {other!r}")
    return ResumeState(
        data=small["data"],
        outstanding=small["outstanding"],
        ledger=small["ledger"],
        queued=queued,
        in_progress=in_progress,
        dropped=dropped,
        next_seq=small["next_seq"],
        failures=small["failures"],
    )


_RECORDS = {
    kind.__name__: kind
    for kind in (
        ScoredGroup,
        RolloutGroup,
        RolloutCompletion,
        Branch,
        PartialRollout,
        RolloutSample,
        TurnRecord,
        TaggedMessage,
        ToolCallRecord,
    )
}
_ENUMS = {"finish_reason": FinishReason, "open_finish": FinishReason, "status": RolloutStatus, "origin": Origin}
_KIND = "grpo_async record"
"""The key that holds a record's name in its JSON object."""


def _line(kind: str, content: Mapping[str, Any]) -> str:
    # the standard library's json keeps NaN, integers of any size and lone surrogates, which a policy may write
    return json.dumps({"kind": kind, **content}, default=_plain)


def _plain(value: Any) -> Any:
    """Convert what JSON cannot represent: a prompt to its id, records by field, numbers of numpy to numbers, anything else (a
    user's own type) to its repr."""
    if isinstance(value, Prompt):
        return {_KIND: "Prompt", "prompt_id": value.prompt_id}
    name = type(value).__name__
    if _RECORDS.get(name) is type(value):  # a user may have a class of the same name
        # not `asdict`: it copies every token
        content = {each.name: getattr(value, each.name) for each in fields(value)}
        if isinstance(value, RolloutCompletion):
            content["reward_columns"] = {name: _or_repr(column) for name, column in value.reward_columns.items()}
        if isinstance(value, ToolCallRecord):
            content["returned"] = _or_repr(value.returned)
        if isinstance(value, ScoredGroup):
            content["extra_columns"] = {
                name: [_or_repr(each) for each in column] for name, column in value.extra_columns.items()
            }
        return {_KIND: name, **content}
    if getattr(value, "dtype", None) == TOP:
        return {_KIND: "Top", "num_tokens": len(value), "rows": base64.b64encode(value.tobytes()).decode()}
    item = getattr(value, "item", None)
    if callable(item) and getattr(value, "ndim", 0) == 0:
        return item()
    tolist = getattr(value, "tolist", None)
    return tolist() if callable(tolist) else safe_repr(value)


def _record_from(prompt_of: Callable[[int], Prompt], content: dict[str, Any]) -> Any:
    """The record that a JSON object describes; any other object unchanged."""
    name = content.pop(_KIND, "")
    if name == "Prompt":
        return prompt_of(content["prompt_id"])
    if name == "Top":
        return top_array(base64.b64decode(content["rows"]), content["num_tokens"])
    kind: Any = _RECORDS.get(name)
    if kind is None:
        return content
    enums = {name: _ENUMS[name](value) for name, value in content.items() if name in _ENUMS and value is not None}
    return kind(**{**content, **enums})


def _or_repr(value: Any) -> Any:
    """A user's value, or its repr if it has no JSON form. A resume gets what JSON makes of it: a tuple becomes a list,
    a key becomes text. The store's `_storable` changes more: NaN, large integers and lone surrogates, which a resume keeps."""
    try:
        json.dumps(value, default=_plain)
    except Exception:  # noqa: BLE001 - an odd key, a circular reference, an error of the user's own `item` or `tolist`
        return safe_repr(value)
    return value
