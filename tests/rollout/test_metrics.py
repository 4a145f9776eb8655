"""The metrics of a step: rewards, rollouts, turns and tools, each number worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from grpo_async.records import (
    FinishReason,
    RolloutCompletion,
    RolloutGroup,
    RolloutStatus,
    ScoredGroup,
    ToolCallRecord,
    TurnRecord,
)
from grpo_async.rollout.metrics import group_metrics
from tests.support.records import make_completion, make_prompt, make_sample


def _call(name: str, duration_s: float, *, failed: bool = False) -> ToolCallRecord:
    return ToolCallRecord(tool_call_id="x", name=name, arguments={}, result="", failed=failed, duration_s=duration_s)


def _turn(num_tokens: int, generation_s: float, *calls: ToolCallRecord, parse_error: str | None = None) -> TurnRecord:
    return TurnRecord(
        output_ids=[5] * num_tokens, output_logprobs=[-0.5] * num_tokens, policy_versions=[0] * num_tokens,
        finish_reason=FinishReason.STOP, tool_calls=calls, generation_duration_s=generation_s, parse_error=parse_error,
    )  # fmt: skip


def _rollout(
    turns: Sequence[TurnRecord], *, total_s: float, truncated: bool = False, done: bool = False, tools: str = "add find"
) -> RolloutCompletion:
    status = RolloutStatus.TRUNCATED if truncated else RolloutStatus.FINISHED
    return RolloutCompletion(
        rollout_id="r", prompt_ids=[1], turns=turns, status=status, done=done,
        total_duration_s=total_s, tool_names=tools.split(),
    )  # fmt: skip


def _metrics(*completions: RolloutCompletion, advantages: Sequence[float] = ()) -> dict[str, float]:
    rewards = [float(index) for index in range(len(completions))]
    return group_metrics(
        [
            ScoredGroup(
                group=RolloutGroup(prompt=make_prompt(), completions=completions),
                samples=[make_sample(advantage=advantage) for advantage in advantages],
                rewards=rewards,
                reward_parts=[{"f": reward} for reward in rewards],
            )
        ]
    )


# two calls of add (one failed) and one of find; then a rollout that called nothing and was cut
TALKER = _rollout(
    [_turn(4, 1.0, _call("add", 0.25), _call("add", 0.75, failed=True)), _turn(2, 3.0, _call("find", 2.0)), _turn(2, 2.0)],
    total_s=10.0, done=True,
)  # fmt: skip
SILENT = _rollout([_turn(6, 6.0)], total_s=6.0, truncated=True)


def test_durations_turns_and_truncation_of_rollouts() -> None:
    """R6.8: total duration, generation duration per turn, truncated, num_turns, advantage, reward."""
    metrics = _metrics(TALKER, SILENT, advantages=[-0.5, 1.5])
    assert metrics["rollout/duration_s"] == 8.0  # (10 + 6) / 2
    assert metrics["rollout/generation_duration_s"] == 3.0  # per turn: (1 + 3 + 2 + 6) / 4
    assert metrics["rollout/num_turns"] == 2.0  # (3 + 1) / 2
    assert metrics["completions/clipped_ratio"] == 0.5
    assert metrics["rollout/done"] == 0.5
    assert metrics["completions/mean_length"] == 7.0  # (4 + 2 + 2 + 6) / 2
    assert metrics["completions/mean_terminated_length"] == 8.0  # the talker's alone
    assert metrics["advantage/abs_mean"] == 1.0  # (0.5 + 1.5) / 2
    assert metrics["reward"] == 0.5  # (0 + 1) / 2
    assert metrics["reward_std"] == pytest.approx(0.5**0.5)


def test_durations_and_failures_of_tools_over_all_and_by_name() -> None:
    """R6.8, R2.7: tool duration total, mean and per name, failures per name.

    Three calls of 0.25, 0.75 and 2.0 s; a rollout without a call counts as 0 calls.
    """
    metrics = _metrics(TALKER, SILENT)
    found = {name: value for name, value in metrics.items() if name.startswith("tools/")}
    assert found == pytest.approx(
        {
            "tools/call_frequency": 1.5,  # 3 / 2
            "tools/failure_frequency": 1 / 3,  # 1 of all 3
            "tools/parse_error_frequency": 0.0,
            "tools/duration_s/mean": 1.0,  # (0.25 + 0.75 + 2) / 3
            "tools/duration_s/per_rollout": 1.5,  # 3 / 2
            "tools/add/call_frequency": 1.0,  # 2 / 2
            "tools/add/failure_frequency": 0.5,  # 1 of 2
            "tools/add/duration_s": 0.5,  # (0.25 + 0.75) / 2
            "tools/find/call_frequency": 0.5,
            "tools/find/failure_frequency": 0.0,
            "tools/find/duration_s": 2.0,
        }
    )


def _scored(rewards: list[float | None], lengths: list[int], **logged: float) -> ScoredGroup:
    completions = [make_completion(f"r{i}", ids=[5] * length) for i, length in enumerate(lengths)]
    return ScoredGroup(
        group=RolloutGroup(prompt=make_prompt(), completions=[*completions, make_completion("f", failed=True)]),
        samples=[],
        rewards=rewards,
        reward_parts=[{"f": reward} for reward in rewards],
        metrics=logged,
    )


def test_each_of_several_sources_has_its_own_metrics() -> None:
    def of(source: str, scored: ScoredGroup) -> ScoredGroup:
        return replace(scored, group=replace(scored.group, prompt=replace(scored.group.prompt, source=source)))

    groups = [_scored([0.0, 1.0], [2, 4]), _scored([1.0, 1.0], [6, 8]), _scored([None, 0.0], [1, 1])]
    metrics = group_metrics([of("math", groups[0]), of("math", groups[1]), of("code", groups[2])])
    assert {name: value for name, value in metrics.items() if name.startswith("source/")} == {
        "source/math/num_groups": 2.0,
        "source/math/reward": 0.75,
        "source/math/solved": 0.75,
        "source/math/frac_reward_zero_std": 0.5,
        "source/math/mean_length": 5.0,
        "source/code/num_groups": 1.0,
        "source/code/reward": 0.0,
        "source/code/solved": 0.0,
        "source/code/frac_reward_zero_std": 1.0,
        "source/code/mean_length": 1.0,
    }
    assert not [name for name in group_metrics(groups) if name.startswith("source/")]


def test_means_are_over_what_exists_and_nothing_is_filled_with_zero() -> None:
    """R1.5. Rewards 0, 1 and 1, None: mean 2 / 3, std sqrt((4 + 1 + 1) / 9 / 2) = sqrt(1 / 3); one group has one value."""
    metrics = group_metrics([_scored([0.0, 1.0], [2, 4], seen=1.0), _scored([1.0, None], [6, 8])])
    assert metrics["reward"] == pytest.approx(2 / 3)
    assert metrics["rewards/f/mean"] == pytest.approx(2 / 3)
    assert metrics["reward_std"] == pytest.approx((1 / 3) ** 0.5)
    assert metrics["frac_reward_zero_std"] == 0.5
    assert metrics["seen"] == 1.0  # logged by one group only
    assert metrics["completions/mean_length"] == 5.0  # the failed rollout has no length
    assert metrics["completions/max_length"] == 8.0
    assert metrics["completions/clipped_ratio"] == 0.0


def test_the_order_in_which_groups_were_done_changes_no_bit() -> None:
    """After a resume, groups that were made one after the other are made side by side."""
    numbers = random.Random(0)
    groups = [_scored([numbers.random() for _ in range(4)], [1, 2, 3, 4]) for _ in range(8)]
    expected = group_metrics(groups)
    for _ in range(20):
        numbers.shuffle(groups)
        assert group_metrics(groups) == expected
    assert "reward" not in group_metrics([_scored([None, None], [1, 1])])
