"""Small builders of records."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from grpo_async.buffer.group import OpenGroup
from grpo_async.buffer.group_table import GroupTable
from grpo_async.records import (
    FinishReason,
    Origin,
    Prompt,
    RolloutCompletion,
    RolloutGroup,
    RolloutSample,
    RolloutStatus,
    ScoredGroup,
    TaggedMessage,
    TurnRecord,
)


def make_prompt(prompt_id: int = 0, text: str = "1 + 1 =", **columns: object) -> Prompt:
    message = TaggedMessage(role="user", content=text, origin=Origin.PROMPT)
    return Prompt(prompt_id=prompt_id, messages=[message], columns=columns)


def make_turn(ids: Sequence[int] = (5, 6), *, version: int = 0, text: str = "2") -> TurnRecord:
    return TurnRecord(
        output_ids=ids,
        output_logprobs=[-0.5] * len(ids),
        policy_versions=[version] * len(ids),
        finish_reason=FinishReason.STOP,
        messages=[TaggedMessage(role="assistant", content=text, origin=Origin.POLICY)],
    )


def make_completion(
    rollout_id: str = "r0", *, ids: Sequence[int] = (5, 6), version: int = 0, failed: bool = False, text: str = "2"
) -> RolloutCompletion:
    return RolloutCompletion(
        rollout_id=rollout_id,
        prompt_ids=[1, 2],
        turns=[] if failed else [make_turn(ids, version=version, text=text)],
        status=RolloutStatus.FAILED if failed else RolloutStatus.FINISHED,
        error="injected" if failed else None,
    )


_NUMBERS = itertools.count()  # every sample is of another rollout


def make_sample(
    *, group_id: int = 0, prompt: Sequence[int] = (1, 2), completion: Sequence[int] = (5, 6), version: int = 0,
    advantage: float = 1.0, logprobs: Sequence[float] | None = None,
) -> RolloutSample:  # fmt: skip
    zeros, count = len(prompt), len(completion)
    return RolloutSample(
        group_id=group_id,
        rollout_id=f"g{group_id}-r{next(_NUMBERS)}",
        token_ids=[*prompt, *completion],
        loss_mask=[0] * zeros + [1] * count,
        sampler_logprobs=[0.0] * zeros + list(logprobs or [-0.5] * count),
        policy_versions=[-1] * zeros + [version] * count,
        advantage=advantage,
        rewards={},
        reward=None,
        truncated=False,
    )


def make_scored(group_id: int = 0, *, version: int = 0, has_samples: bool = True) -> ScoredGroup:
    completions = [make_completion(f"g{group_id}-r{index}", version=version) for index in range(2)]
    group = RolloutGroup(prompt=make_prompt(group_id), completions=completions)
    sample = make_sample(group_id=group_id, version=version)
    samples = [replace(sample, rollout_id=each.rollout_id) for each in completions] if has_samples else []
    return ScoredGroup(group=group, samples=samples, rewards=[0.0, 1.0], reward_parts=[{"f": 0.0}, {"f": 1.0}])


def start_group(table: GroupTable, group_id: int) -> None:
    table.start(OpenGroup(prompt=make_prompt(group_id), size=2))
