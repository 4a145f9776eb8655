"""What the store keeps of every turn and of every tool call."""

from __future__ import annotations

import json
from pathlib import Path

from grpo_async.records import FinishReason, GroupStatus, RolloutCompletion, RolloutStatus, ToolCallRecord, TurnRecord
from grpo_async.store import read_groups
from tests.store.builders import OpenStore, build_group


def _turn(generation_s: float, execution_s: float, *calls: ToolCallRecord) -> TurnRecord:
    return TurnRecord(
        output_ids=[5], output_logprobs=[-0.5], policy_versions=[0], finish_reason=FinishReason.STOP, tool_calls=calls,
        generation_duration_s=generation_s, tool_execution_duration_s=execution_s,
    )  # fmt: skip


def test_timings_of_every_turn_and_arguments_failure_and_duration_of_every_call_reach_the_store(
    tmp_path: Path, open_store: OpenStore
) -> None:
    """R2.8: two turns with timings of their own, two calls in the first of which one failed, one in the second."""
    calls = [
        ToolCallRecord(tool_call_id="a", name="add", arguments={"a": 1}, result="2", failed=False, duration_s=0.25),
        ToolCallRecord(tool_call_id="b", name="add", arguments={}, result="no", failed=True, duration_s=0.5),
        ToolCallRecord(tool_call_id="c", name="find", arguments={"q": ["x"]}, result="y", failed=False, duration_s=2.0),
    ]
    turns = [_turn(1.5, 0.75, *calls[:2]), _turn(3.0, 2.25, calls[2])]
    completion = RolloutCompletion(
        rollout_id="1-0", prompt_ids=[1], turns=turns, status=RolloutStatus.FINISHED, total_duration_s=8.0
    )
    store = open_store(tmp_path)
    store.append(build_group(1, [completion]), [], GroupStatus.FILTERED, None)
    store.flush()
    (row,) = read_groups(tmp_path)
    (rollout,) = row.rollouts
    assert rollout.total_duration_s == 8.0
    timings = [(turn.generation_duration_s, turn.tool_execution_duration_s) for turn in rollout.turns]
    assert timings == [(1.5, 0.75), (3.0, 2.25)]
    assert [list(turn.tool_calls) for turn in rollout.turns] == [calls[:2], calls[2:]]
    # and under these names in the file, which other tools read too
    (line,) = next(tmp_path.glob("block-*.jsonl")).read_text().splitlines()
    stored = json.loads(line)["rollouts"][0]["turns"]
    assert [turn["generation_duration_s"] for turn in stored] == [1.5, 3.0]
    first, failed = stored[0]["tool_calls"]
    assert (first["arguments"], first["failed"], first["duration_s"]) == ({"a": 1}, False, 0.25)
    assert (failed["arguments"], failed["failed"], failed["duration_s"]) == ({}, True, 0.5)
