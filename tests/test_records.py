"""Derived views of the records."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_async.records import FinishReason, RolloutCompletion, RolloutStatus, ToolCallRecord, TurnRecord
from tests.support.records import make_completion, make_sample, make_turn


def _two_turns() -> RolloutCompletion:
    call = ToolCallRecord(tool_call_id="a", name="calc", arguments={}, result="9", failed=False, duration_s=0.1)
    failed = ToolCallRecord(tool_call_id="b", name="calc", arguments={}, result="", failed=True, duration_s=0.1)
    first = TurnRecord(
        output_ids=[3, 4],
        output_logprobs=[-0.25, -0.5],
        policy_versions=[6, 7],
        finish_reason=FinishReason.STOP,
        tool_calls=[call, failed],
        tool_response_ids=[9],
    )
    turns = [first, make_turn([5], version=7)]
    return RolloutCompletion(
        rollout_id="r", prompt_ids=[1, 2], turns=turns, status=RolloutStatus.FINISHED, tool_names=["calc"]
    )


def test_tool_metrics_count_calls_and_failures() -> None:
    """R2.7: 2 calls of which 1 failed -> 2.0 and 1 / 2 = 0.5; no calls -> 0.0 and 0.0; no tools -> nothing."""
    assert _two_turns().tool_metrics() == {"tools/call_frequency": 2.0, "tools/failure_frequency": 0.5}
    silent = replace(make_completion(), tool_names=["calc"])
    assert silent.tool_metrics() == {"tools/call_frequency": 0.0, "tools/failure_frequency": 0.0}
    assert make_completion().tool_metrics() == {}


def test_a_turn_with_a_missing_logprob_is_refused() -> None:
    with pytest.raises(ValueError, match=r"ids/logprobs/versions = \(2, 1, 2\)"):
        TurnRecord(output_ids=[1, 2], output_logprobs=[0.0], policy_versions=[0, 0], finish_reason=FinishReason.STOP)


def test_a_sample_knows_its_oldest_trained_version() -> None:
    sample = make_sample(version=4)
    assert sample.oldest_version == 4  # not the -1 of the prompt
    assert sample.num_trained_tokens == 2
