"""What the rollout side puts into a checkpoint is read back as it was."""

from __future__ import annotations

import json
import math
from dataclasses import make_dataclass, replace

import numpy as np

from grpo_async.buffer.resume import GroupSnapshot, PartialRollout, ResumeState, read_resume_state
from grpo_async.records import (
    TOP,
    FinishReason,
    Origin,
    RolloutStatus,
    TaggedMessage,
    ToolCallRecord,
    TurnRecord,
)
from tests.support.records import make_completion, make_prompt, make_scored


def _turn() -> TurnRecord:
    call = ToolCallRecord(
        tool_call_id="abcdefghi", name="add", arguments={"a": 2**70}, result="half \ud800 a pair", failed=False, duration_s=0.5,
        returned=[["a", 1]],
    )  # fmt: skip
    message = TaggedMessage(role="assistant", content="3", origin=Origin.POLICY, tool_calls=[{"id": "abcdefghi"}])
    return TurnRecord(
        output_ids=[5, 6],
        output_logprobs=[-0.12345678, -1e-30],
        policy_versions=[3, 4],
        finish_reason=FinishReason.STOP,
        messages=[message],
        tool_calls=[call],
        tool_response_ids=[9],
        parse_error="no",
        generation_duration_s=0.25,
        output_top=np.array([[(5, -0.1), (7, -2.5)], [(8, -0.3), (6, -1e-30)]], TOP),
    )


def _state() -> ResumeState:
    made = make_scored(8, version=3)
    scored = replace(
        made,
        samples=[replace(sample, top=_turn().output_top) for sample in made.samples],
        metrics={"mine": math.nan},
        extra_columns={"note": ["a", None]},
        reward_parts=[{"f": None}, {"f": 1.0}],
    )
    partial = PartialRollout(
        rollout_id="g9-r1",
        prompt_ids=[1, 2],
        turns=[_turn()],
        open_ids=[7],
        open_logprobs=[-0.3],
        open_versions=[4],
        open_finish=FinishReason.LENGTH,
        open_top=np.array([[(7, -0.3), (5, -np.inf)]], TOP),
    )
    over = replace(make_completion("g9-r0"), turns=[_turn()], prompt_messages=[_turn().messages[0]])
    return ResumeState(
        data={"next_prompt_id": 11},
        outstanding=[8, 9, 10],
        ledger={"groups": {"started": 3, "trained": 3}, "tokens": {"started": 30, "trained": 30}},
        queued=[scored, make_scored(7, has_samples=False)],
        in_progress=[GroupSnapshot(group_id=9, rollouts={0: over, 1: partial})],
        dropped=[make_scored(6, has_samples=False)],
        next_seq=1234,
        failures={"rollout: TimeoutError": 2},
    )


def _through_files(state: ResumeState) -> ResumeState:
    lines = [line.encode("utf-8").decode("utf-8") for line in state.lines()]  # as a file would hold them
    assert not any("\n" in line for line in lines)
    return read_resume_state(json.loads(json.dumps(state.small())), lines, make_prompt)


def test_a_state_is_read_back_as_it_was() -> None:
    state = _state()
    read = _through_files(state)
    assert math.isnan(read.queued[0].metrics["mine"])
    assert (read.small(), list(read.lines())) == (state.small(), list(state.lines()))  # tuples have become lists
    assert read.next_seq == 1234
    turn = read.in_progress[0].rollouts[0].turns[0]
    assert turn.output_logprobs.tolist() == _turn().output_logprobs.tolist()  # to the last bit
    assert turn.policy_versions.tolist() == [3, 4]
    assert turn.output_top.dtype == TOP
    assert turn.output_top.tolist() == _turn().output_top.tolist()
    assert read.queued[0].samples[0].top.tolist() == _turn().output_top.tolist()
    assert read.in_progress[0].rollouts[1].open_top.tolist() == [[(7, np.float32(-0.3)), (5, -np.inf)]]
    assert turn.tool_calls == _turn().tool_calls
    assert turn.messages == _turn().messages
    begun = read.in_progress[0].rollouts
    assert isinstance(begun[0].turns[0].finish_reason, FinishReason)
    assert begun[0].status is RolloutStatus.FINISHED  # type: ignore[union-attr]


def test_what_was_sampled_with_another_number_of_likeliest_tokens_is_sampled_again() -> None:
    """`loss.score_centering` may be changed at a resume."""
    for num_top, queued, begun in ((2, [8, 7], [9]), (3, [7], [])):
        kept = _state().with_top(num_top)
        assert [[each.group_id for each in groups] for groups in (kept.queued, kept.in_progress)] == [queued, begun]


def test_what_json_does_not_know_is_kept_as_a_number_or_as_text() -> None:
    own = make_dataclass("Branch", ["score"])(1)  # a user's class with the name of a record
    logged = {"n": [np.float32(0.5), np.int64(3)], "o": [np.ones(2), own, {(1, 2): 3}]}
    state = replace(_state(), queued=[replace(make_scored(1), extra_columns=logged)], in_progress=[], dropped=[])
    assert _through_files(state).queued[0].extra_columns == {
        "n": [0.5, 3], "o": [[1.0, 1.0], "Branch(score=1)", "{(1, 2): 3}"],
    }  # fmt: skip
