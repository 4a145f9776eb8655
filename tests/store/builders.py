"""Groups with everything that a row can hold."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from grpo_async.config.sections import RolloutRecordSection
from grpo_async.records import (
    Branch,
    FinishReason,
    GroupStatus,
    Origin,
    Prompt,
    RolloutCompletion,
    RolloutGroup,
    RolloutSample,
    RolloutStatus,
    ScoredGroup,
    TaggedMessage,
    TokenStats,
    ToolCallRecord,
    TurnRecord,
)
from grpo_async.store import RolloutStore
from grpo_async.store.seal import seal_block
from tests.support.stored import LineStore


def build_rollout(
    rollout_id: str,
    *,
    text: str = "two",
    ids: Sequence[int] = (5, 6, 7),
    logprobs: Sequence[float] | None = None,
    version: int = 0,
    truncated: bool = False,
) -> RolloutCompletion:
    """One turn without tools."""
    turn = TurnRecord(
        output_ids=list(ids),
        output_logprobs=list(logprobs) if logprobs else [-0.25] * len(ids),
        policy_versions=[version] * len(ids),
        finish_reason=FinishReason.LENGTH if truncated else FinishReason.STOP,
        messages=[TaggedMessage(role="assistant", content=text, origin=Origin.POLICY)],
        generation_duration_s=0.5,
    )
    status = RolloutStatus.TRUNCATED if truncated else RolloutStatus.FINISHED
    return RolloutCompletion(
        rollout_id=rollout_id, prompt_ids=[1, 2], turns=[turn], status=status, total_duration_s=0.75
    )


def build_tool_rollout(rollout_id: str) -> RolloutCompletion:
    """Two turns; a tool answers between them with two tokens: ids [5, 6, 90, 91, 7], mask [1, 1, 0, 0, 1]."""
    call = ToolCallRecord(
        tool_call_id="c1", name="add", arguments={"a": 1, "b": {2}}, result="\ud83d", failed=True, duration_s=0.125
    )
    first, second = (
        build_rollout("", text=text, ids=ids, logprobs=logprobs, version=3).turns[0]
        for text, ids, logprobs in (("add(1, 2)", (5, 6), (-0.5, -1.5)), ("three", (7,), (-3.5,)))
    )
    first = replace(
        first,
        policy_versions=[2, 3],
        messages=[*first.messages, TaggedMessage(role="tool", content="3", origin=Origin.TOOL)],
        tool_calls=[call],
        tool_response_ids=[90, 91],
        tool_execution_duration_s=0.125,
    )
    return RolloutCompletion(
        rollout_id=rollout_id, prompt_ids=[1, 2], turns=[first, second], status=RolloutStatus.FINISHED, done=True
    )


def build_branched_rollout(rollout_id: str) -> RolloutCompletion:
    """An agent's: its own path, behind it branch b1 with a reward of its own, and b2, which goes on from b1."""

    def branch(name: str, parent: int, text: str, started_at: float, reward: float | None = None) -> Branch:
        (turn,) = build_rollout("", text=text, ids=(8, 9)).turns
        asked = [TaggedMessage(role="user", content=f"ask {name}", origin=Origin.TOOL)]
        return Branch(
            name=name, parent=parent, prompt_ids=[1, 2, 3], turns=[replace(turn, started_at=started_at)],
            prompt_messages=asked, reward=reward,
        )  # fmt: skip

    own = build_rollout(rollout_id)
    return replace(
        own,
        started_at=100.0,
        turns=[replace(own.turns[0], started_at=100.5)],
        branches=[branch("b1", 0, "one", 101.0, 0.25), branch("b2", 1, "nine", 102.0)],
    )


def build_failed_rollout(rollout_id: str, error: str = "the server refused the request") -> RolloutCompletion:
    return RolloutCompletion(
        rollout_id=rollout_id, prompt_ids=[1, 2], turns=[], status=RolloutStatus.FAILED, error=error
    )


def build_group(
    group_id: int, completions: Sequence[RolloutCompletion], *, text: str = "what is 1 + 1?", **columns: object
) -> RolloutGroup:
    prompt = Prompt(
        prompt_id=group_id,
        messages=[
            TaggedMessage(role="system", content="be brief", origin=Origin.PROMPT),
            TaggedMessage(role="user", content=text, origin=Origin.PROMPT),
        ],
        columns=columns,
    )
    return RolloutGroup(prompt=prompt, completions=list(completions))


def build_sample(group_id: int, completion: RolloutCompletion, reward: float, advantage: float = 0.0) -> RolloutSample:
    return RolloutSample(
        group_id=group_id,
        rollout_id=completion.rollout_id,
        token_ids=completion.completion_ids,
        loss_mask=completion.completion_mask,
        sampler_logprobs=completion.logprobs,
        policy_versions=completion.policy_versions,
        advantage=advantage,
        rewards={"exact": reward, "format": None},
        reward=reward,
        truncated=completion.truncated,
    )


def build_scored(group: RolloutGroup, samples: Sequence[RolloutSample]) -> ScoredGroup | None:
    """The group with the rewards of its samples; None without one."""
    by_id = {sample.rollout_id: sample for sample in samples}
    found = [by_id.get(each.rollout_id) for each in group.trainable]
    rewards, parts = [each and each.reward for each in found], [each.rewards if each else {} for each in found]
    return ScoredGroup(group=group, samples=samples, rewards=rewards, reward_parts=parts) if samples else None


def append(
    store: RolloutStore,
    group: RolloutGroup,
    samples: Sequence[RolloutSample],
    status: GroupStatus,
    step: int | None,
    *,
    scored: ScoredGroup | None = None,
    **more: Any,
) -> None:
    """Store a group with the rewards of `samples`, or of `scored`."""
    store.append(group, status, step, scored=scored or build_scored(group, samples), **more)


def append_simple(
    store: RolloutStore,
    group_id: int,
    *,
    rewards: Sequence[float] = (0.0, 1.0),
    status: GroupStatus = GroupStatus.TRAINED,
    step: int | None = 1,
    text: str = "what is 1 + 1?",
    answer: str = "two",
    num_tokens: int = 3,
    version: int = 0,
    truncated: bool = False,
) -> None:
    """A group whose rollouts `group_id-0`, `group_id-1`, ... get `rewards`; it can be read when this returns."""
    completions = [
        build_rollout(
            f"{group_id}-{i}", text=answer, ids=range(5, 5 + num_tokens), version=version, truncated=truncated
        )
        for i in range(len(rewards))
    ]
    samples = [build_sample(group_id, each, reward) for each, reward in zip(completions, rewards, strict=True)]
    append(store, build_group(group_id, completions, text=text), samples, status, step)
    store.flush()


def write_groups(folder: Path, *group_ids: int, seal: bool = False, **more: Any) -> None:
    """A writer that comes and goes; `more` as `append_simple`. `seal`: its blocks become Parquet files."""
    with LineStore(folder) as store:
        for group_id in group_ids:
            append_simple(store, group_id, **more)
    if seal:
        seal_all(folder)


def seal_all(folder: Path) -> None:
    for lines in sorted(folder.glob("block-*.jsonl")):
        seal_block(lines)


def small_blocks(**changes: Any) -> RolloutRecordSection:
    """Settings with blocks of 1 kB, which the config does not allow."""
    return RolloutRecordSection().model_copy(update={"block_mb": 0.001, **changes})


def build_stats(num_tokens: int, *, first: float = 0.0) -> TokenStats:
    """logprobs -1, -1.5, ...; proximal_logprobs 0.25 less; weights 1, 2, ...; entropies 0.5, 1.5, ...; flags 0, 1, 2, ..."""
    steps = [first + index for index in range(num_tokens)]
    return TokenStats(
        logprobs=[-1.0 - 0.5 * step for step in steps],
        proximal_logprobs=[-1.25 - 0.5 * step for step in steps],
        weights=np.array([1.0 + step for step in steps], dtype=np.float32),  # type: ignore[arg-type]
        entropies=[0.5 + step for step in steps],
        flags=np.array([index % 64 for index in range(num_tokens)], dtype=np.uint8),  # type: ignore[arg-type]
    )
