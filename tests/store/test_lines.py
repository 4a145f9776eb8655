"""What goes into a line comes out of it, whatever policies, tools and users' functions wrote."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from grpo_async.records import (
    FinishReason,
    GroupStatus,
    Origin,
    RolloutGroup,
    RolloutSample,
    RolloutStatus,
    ScoredGroup,
    TokenStats,
)
from grpo_async.store.lines import Entry, check_stats, line_of
from grpo_async.store.rows import GroupRow, from_columns
from grpo_async.store.schema import COLUMN_NAMES, SCHEMA, select_from_lines
from tests.store.builders import (
    build_branched_rollout,
    build_failed_rollout,
    build_group,
    build_rollout,
    build_sample,
    build_scored,
    build_stats,
    build_tool_rollout,
)


def _line(
    group: RolloutGroup,
    samples: Sequence[RolloutSample] = (),
    status: GroupStatus = GroupStatus.TRAINED,
    step: int | None = None,
    scored: ScoredGroup | None = None,
    **more: Any,
) -> bytes:
    scored = scored or build_scored(group, samples)
    return line_of(Entry(seq=17, group=group, status=status, step=step, written_at=1000.5, scored=scored, **more))


def _row(*arguments: Any, **more: Any) -> GroupRow:
    return _read(_line(*arguments, **more))


def _read(line: bytes) -> GroupRow:
    """As every reader: by the SELECT of the schema."""
    with tempfile.NamedTemporaryFile() as file, duckdb.connect() as connection:
        file.write(line)
        file.flush()
        rows = connection.execute(select_from_lines(Path(file.name))).fetchall()
    return from_columns([dict(zip(COLUMN_NAMES, row, strict=True)) for row in rows])


def test_a_row_holds_everything_of_a_group() -> None:
    tool, failed = build_tool_rollout("7-0"), build_failed_rollout("7-1")
    turns = [replace(tool.turns[0], started_at=991.0), *tool.turns[1:]]
    tool = replace(tool, started_at=990.0, turns=turns, reward_columns={"seat": 3})  # of a rollout function
    row = _row(build_group(7, [tool, failed], answer=3), [build_sample(7, tool, 0.5, advantage=1.25)], step=4)
    assert (row.schema, row.seq, row.group_id, row.prompt_id, row.step) == (SCHEMA, 17, 7, 7, 4)
    assert (row.status, row.written_at, len(row.prompt_hash)) == (GroupStatus.TRAINED, 1000.5, 16)
    assert [(m.role, m.content, m.origin) for m in row.messages] == [
        ("system", "be brief", Origin.PROMPT),
        ("user", "what is 1 + 1?", Origin.PROMPT),
    ]
    assert row.columns == {"answer": 3}
    first, second = row.rollouts
    assert (first.rollout_id, first.status, first.done, first.truncated) == ("7-0", RolloutStatus.FINISHED, True, False)
    assert (first.reward, first.advantage, first.rewards) == (0.5, 1.25, {"exact": 0.5, "format": None})
    assert first.extra == {"seat": 3}
    assert (first.started_at, first.turns[0].started_at, first.turns[1].started_at) == (990.0, 991.0, 0.0)
    assert first.prompt_ids == second.prompt_ids == [1, 2]
    assert first.completion_ids == [5, 6, 90, 91, 7]
    assert first.mask == [1, 1, 0, 0, 1]
    assert first.logprobs == [-0.5, -1.5, 0.0, 0.0, -3.5]
    assert first.versions == [2, 3, -1, -1, 3]
    assert (first.num_tokens, first.sampled_versions) == (3, {2, 3})
    assert [message.origin for message in first.messages] == [Origin.POLICY, Origin.TOOL, Origin.POLICY]
    assert [turn.num_tokens for turn in first.turns] == [2, 1]
    assert first.turns[0].finish_reason is FinishReason.STOP
    assert first.turns[0].tool_execution_duration_s == 0.125
    (call,) = first.turns[0].tool_calls
    assert (call.name, call.failed, call.arguments) == ("add", True, {"a": 1, "b": "{2}"})
    assert call.result == "\\ud83d"  # a lone surrogate: UTF-8 cannot hold it
    assert (second.status, second.reward) == (RolloutStatus.FAILED, None)
    assert second.error == "the server refused the request"
    assert first.weights is second.token_flags is None


def test_branches_stand_below_their_rollout_each_with_its_own_turns_tokens_and_stats() -> None:
    branched = build_branched_rollout("g7-r0")
    own = build_sample(7, branched, 0.5, advantage=1.25)
    second = replace(own, rollout_id="g7-r0.b2", advantage=-1.0, reward=0.75)
    (rollout,) = _row(build_group(7, [branched]), [own, second], stats={"g7-r0.b2": build_stats(2)}).rollouts
    assert (rollout.num_tokens, len(rollout.completion_ids), rollout.weights) == (7, 3, None)
    first, other = rollout.branches
    assert [path.rollout_id for path in rollout.paths] == ["g7-r0", "g7-r0.b1", "g7-r0.b2"]
    assert [path.parent for path in rollout.paths] == [None, "g7-r0", "g7-r0.b1"]
    assert [path.started_at for path in rollout.paths] == [100.0, 101.0, 102.0]
    assert (first.reward, first.advantage, other.reward, other.advantage) == (0.25, None, 0.75, -1.0)
    assert (other.num_tokens, other.prompt_ids, other.completion_ids) == (2, [1, 2, 3], [8, 9])
    assert (other.mask, other.logprobs, other.versions) == ([1, 1], [-0.25, -0.25], [0, 0])
    assert (other.trainer_logprobs, other.weights, first.weights) == ([-1.0, -1.5], [1.0, 2.0], None)
    assert [message.content for message in other.reset_messages or ()] == ["ask b2"]
    assert [message.content for message in other.messages] == ["nine"]
    assert other.turns[0].finish_reason is FinishReason.STOP
    assert other.status is rollout.status


@pytest.mark.parametrize("name", ["logprobs", "proximal_logprobs", "weights", "entropies", "flags"])
def test_stats_that_do_not_fit_their_rollout_are_refused(name: str) -> None:
    stats: TokenStats = replace(build_stats(3), **{name: [0, 0]})
    with pytest.raises(ValueError, match=r"7-0 has 3 sampled tokens; .* have {.*'NAME': 2.*}".replace("NAME", name)):
        check_stats(build_group(7, [build_tool_rollout("7-0")]), {"7-0": stats})
    check_stats(build_group(7, [build_tool_rollout("7-0")]), {"7-0": build_stats(3), "7-9": stats})


def test_numbers_that_are_not_finite_are_missing() -> None:
    stats = replace(build_stats(2), weights=[float("inf"), 1.0], entropies=[float("nan"), 2.0])
    completion = build_rollout("1-0", ids=(5, 6), logprobs=[-float("inf"), -0.5])
    sample = build_sample(1, completion, float("nan"))
    (rollout,) = _row(build_group(1, [completion]), [sample], stats={"1-0": stats}).rollouts
    assert (rollout.weights, rollout.entropies, rollout.logprobs) == ([None, 1.0], [None, 2.0], [None, -0.5])
    assert rollout.reward is None


def test_a_logprob_is_stored_as_the_float32_that_it_was() -> None:
    values = [float(np.float32(value)) for value in (-0.1, -1e-7, -12.345678)]
    line = _line(build_group(1, [build_rollout("1-0", logprobs=values)]))
    assert b'"logprobs":[-0.1,-1e-7,-12.345678]' in line
    assert _read(line).rollouts[0].logprobs == values


def test_prompt_ids_that_differ_within_a_group_are_kept_apart() -> None:
    """An environment's reset changed the prompt of one rollout."""
    first, second = build_rollout("1-0"), replace(build_rollout("1-1"), prompt_ids=[1, 2, 3])
    line = _line(build_group(1, [first, second, build_rollout("1-2")]))
    assert line.count(b'"prompt_ids":[1,2]') == 1
    assert [rollout.prompt_ids for rollout in _read(line).rollouts] == [[1, 2], [1, 2, 3], [1, 2]]


def test_the_hash_of_a_prompt_is_that_of_its_messages() -> None:
    same = _row(build_group(1, [build_rollout("1-0")], answer=1)).prompt_hash
    assert _row(build_group(2, [], answer=2)).prompt_hash == same
    assert _row(build_group(1, [], text="what is 1 + 2?")).prompt_hash != same
    one, two = (_row(build_group(1, [], text=" ", answer=answer)).prompt_hash for answer in (1, 2))
    assert one != two  # an environment makes a prompt of each


def test_columns_that_json_cannot_hold_become_their_repr() -> None:
    columns: dict[Any, Any] = {
        "big": 2**70, "nested": {"a": [{2}]}, "bad": "\ud800", 3: {4: 5}, "nan": float("nan"), "array": np.arange(2),
    }  # fmt: skip
    columns["circle"] = [columns]
    group = build_group(1, [])
    found = dict(_row(replace(group, prompt=replace(group.prompt, columns=columns))).columns)
    assert "..." in str(found.pop("circle"))
    assert found == {
        "big": str(2**70), "nested": {"a": ["{2}"]}, "bad": "\\ud800", "3": {"4": 5}, "nan": None, "array": [0, 1],
    }  # fmt: skip
