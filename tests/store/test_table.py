"""Pages, single groups and rollouts, statistics, and what superseded rows do."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from grpo_async.errors import RunError
from grpo_async.records import GroupStatus, Origin, TaggedMessage
from grpo_async.store.query import QueryError, parse_query
from grpo_async.store.table import RolloutTable
from tests.store.builders import (
    OpenStore,
    append,
    append_simple,
    build_group,
    build_tool_rollout,
)
from tests.support.stored import LineStore

REWARDS = {0: (0.0, 0.5), 1: (0.25, 0.25), 2: (0.0, 1.0), 3: (1.0, 1.0)}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutTable]:
    """Groups 0 and 1 in step 1, 2 and 3 in step 2; 0 and 2 have the same prompt; 4 (no step) has tools and no reward."""
    folder = tmp_path_factory.mktemp("table") / "rollouts"
    with LineStore(folder) as store:
        for group_id, rewards in REWARDS.items():
            text = "the same" if group_id % 2 == 0 else f"prompt {group_id}"
            append_simple(store, group_id, rewards=rewards, step=1 + group_id // 2, text=text, num_tokens=3 + group_id)
        group = build_group(4, [build_tool_rollout("4-0")], answer=1, odd_one=2)
        append(store, group, [], GroupStatus.CANCELLED, None)
    with RolloutTable(folder) as opened:
        yield opened


def test_a_page_is_a_window_of_the_sorted_rollouts(table: RolloutTable) -> None:
    def ids(sort: str, offset: int = 0, limit: int = 50) -> list[str]:
        return [each["rollout_id"] for each in table.page(sort=sort, offset=offset, limit=limit)]

    newest = ["4-0", "3-0", "3-1", "2-0", "2-1", "1-0", "1-1", "0-0", "0-1"]
    assert ids("-seq") == newest
    assert ids("-seq", 2, 3) == newest[2:5]
    assert ids("-seq", 8) == newest[8:]
    assert ids("-seq", 100) == []
    assert ids("-seq", 0, 0) == []
    assert ids("seq,index") == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1", "3-0", "3-1", "4-0"]
    # what has no reward comes last either way; of equal ones the newest first
    assert ids("reward") == ["2-0", "0-0", "1-0", "1-1", "0-1", "3-0", "3-1", "2-1", "4-0"]
    assert ids("-reward") == ["3-0", "3-1", "2-1", "0-1", "1-0", "1-1", "2-0", "0-0", "4-0"]
    assert ids("-reward, seq")[:4] == ["2-1", "3-0", "3-1", "0-1"]
    assert ids("-group_reward, id")[:3] == ["3-0", "3-1", "2-0"]
    assert ids("rewards['exact']")[:2] == ["2-0", "0-0"]


@pytest.mark.parametrize("sort", ["rewrd", "-", "", "tool", "seq; DROP TABLE unsealed", "columns['a']"])
def test_a_sort_that_cannot_be_is_an_error(table: RolloutTable, sort: str) -> None:
    with pytest.raises(QueryError):
        table.page(sort=sort)
    with pytest.raises(QueryError):
        table.group_page(sort=sort)


def test_a_preview_is_what_the_policy_wrote_behind_the_prompt_that_it_saw(
    open_store: OpenStore, tmp_path: Path
) -> None:
    rollout = build_tool_rollout("r")
    call = {"id": "c1", "function": {"name": "add", "arguments": {"a": 1}}}
    first, *rest = rollout.turns
    nameless = {"id": "c2", "function": {"name": "", "arguments": {}}}
    said = [replace(first.messages[0], content="", tool_calls=[call, nameless]), *first.messages[1:]]
    asked = [TaggedMessage(role="user", content="the river", origin=Origin.ENVIRONMENT)]
    with open_store(tmp_path) as store:
        turns = [replace(first, messages=said), *rest]
        group = build_group(9, [replace(rollout, turns=turns, prompt_messages=asked)], text="")
        append(store, group, [], GroupStatus.FILTERED, 5)
    with RolloutTable(tmp_path) as table:
        ((found,), (whole,)) = table.page(), table.group_page()
    assert (found["prompt_preview"], found["completion_preview"]) == (
        "the river",
        f'add({{"a":1}}) {json.dumps(nameless, separators=(",", ":"))}\nthree',
    )
    assert whole["prompt_preview"] == "the river"


def test_a_group_in_a_table_is_its_rollouts_together(table: RolloutTable) -> None:
    by_id = {group["group_id"]: group for group in table.group_page()}
    group = by_id[2]
    assert (group["size"], group["num_matching"]) == (2, 2)
    assert (group["reward_mean"], group["reward_min"], group["reward_max"]) == (0.5, 0.0, 1.0)
    assert group["reward_std"] == pytest.approx(statistics.stdev((0.0, 1.0)))
    assert group["num_tokens_mean"] == 5.0
    assert group["prompt_preview"] == "the same"
    assert by_id[4]["tool_names"] == ["add"]
    assert (by_id[4]["num_tool_calls"], by_id[4]["num_failed_tool_calls"], by_id[4]["reward_mean"]) == (1, 1, None)


def test_a_step_counts_from_when_it_is_done(open_store: OpenStore, tmp_path: Path) -> None:
    """Of step 3 one group is filtered already; its mean alone would look like a collapse."""
    with open_store(tmp_path) as store:
        append_simple(store, 0, step=2, rewards=(0.0, 1.0))
        append_simple(store, 1, step=2, rewards=(1.0, 1.0), status=GroupStatus.FILTERED)
        append_simple(store, 2, step=3, rewards=(0.0, 0.0), status=GroupStatus.FILTERED)
    with RolloutTable(tmp_path) as table:
        assert table.count(parse_query("step=last and (filtered or stale)")).groups == 1
        assert table.count(parse_query("step=3")).groups == 1, "it can be looked at"


def test_a_page_of_groups_counts_the_rollouts_that_match(table: RolloutTable) -> None:
    found = table.group_page(parse_query("reward>=0.5"), sort="-matching,seq")
    assert [(group["group_id"], group["num_matching"], group["size"]) for group in found] == [
        (3, 2, 2),
        (0, 1, 2),
        (2, 1, 2),
    ]
    assert [group["group_id"] for group in table.group_page(sort="-reward")] == [3, 2, 1, 0, 4]
    assert [group["group_id"] for group in table.group_page(sort="std", limit=2, offset=1)] == [1, 0]
    with pytest.raises(QueryError, match="nothing to sort by that is called 'advantage'"):
        table.group_page(sort="advantage")


def test_superseded_rows_are_left_out_unless_asked_for(open_store: OpenStore, tmp_path: Path) -> None:
    """Groups 1 and 2 were written after the checkpoint; a resume makes 1 anew."""
    with open_store(tmp_path) as store:
        append_simple(store, 0)
        position = store.position()
        append_simple(store, 1, rewards=(0.0, 0.0), step=2)
        append_simple(store, 2, step=2)
    with RolloutTable(tmp_path) as table:
        assert table.count().groups == 3
        with open_store(tmp_path) as store:
            store.supersede_from(position, step=1)
            append_simple(store, 1, rewards=(1.0, 1.0), step=2)
        assert table.refresh()
        assert table.count().groups == 2
        assert table.count(with_superseded=True).groups == 4
        assert table.group(1).rollouts[0].reward == 1.0
        with pytest.raises(RunError, match=r"no group 2 .*a resume may have left it behind"):
            table.group(2)
        with pytest.raises(RunError, match="no rollout 2-0 "):
            table.rollout("2-0")
        assert [group["group_id"] for group in table.group_page(sort="seq")] == [0, 1]
        assert table.newest_seq == 3
        assert table.count(parse_query("superseded"), with_superseded=True).groups == 2
        assert any("2 of 4 groups were written after a checkpoint" in note for note in table.notes)
