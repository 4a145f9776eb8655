"""What a run wrote behind the checkpoint that it went on from is no part of it; nothing is removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_async.errors import RunError
from grpo_async.records import GroupStatus
from grpo_async.store.blocks import Branch, add_branch, find_blocks, read_branches
from grpo_async.store.reader import read_groups, scan_groups
from grpo_async.store.rollout_store import RolloutStore
from tests.store.builders import OpenStore, small_blocks
from tests.support.records import make_scored


def _append(store: RolloutStore, *group_ids: int, step: int = 1) -> None:
    for group_id in group_ids:
        scored = make_scored(group_id)
        store.append(scored.group, scored.samples, GroupStatus.TRAINED, step, scored=scored)


def _ids(folder: Path) -> list[int]:
    return [row.group_id for row in read_groups(folder)]


def test_rows_behind_the_checkpoint_are_left_out_and_those_before_and_after_stay(
    tmp_path: Path, open_store: OpenStore
) -> None:
    with open_store(tmp_path) as store:
        _append(store, 0, 1)
        checkpoint = store.position()
        _append(store, 2, 3)
    with open_store(tmp_path) as resumed:
        resumed.supersede_from(checkpoint, step=1)
        _append(resumed, 2)
    assert _ids(tmp_path) == [0, 1, 2]
    everything = list(scan_groups(tmp_path, with_superseded=True))
    assert [(s.row.seq, s.row.group_id, s.superseded) for s in everything] == [
        (0, 0, False), (1, 1, False), (2, 2, True), (3, 3, True), (4, 2, False),
    ]  # fmt: skip


def test_the_same_checkpoint_may_be_gone_on_from_again_and_again(tmp_path: Path, open_store: OpenStore) -> None:
    with open_store(tmp_path) as store:
        _append(store, 0)
        checkpoint = store.position()
        _append(store, 1)
    for group_id in (10, 11):
        with open_store(tmp_path) as resumed:
            resumed.supersede_from(checkpoint, step=1)
            _append(resumed, group_id)
    assert _ids(tmp_path) == [0, 11]
    with open_store(tmp_path) as store:
        later = store.position()
        _append(store, 12)
    assert later == 4  # 0, 1, 10, 11
    with open_store(tmp_path) as resumed:
        resumed.supersede_from(later, step=2)
        assert resumed.position() == 5
        _append(resumed, 13)
    assert _ids(tmp_path) == [0, 11, 13]


def test_a_checkpoint_before_the_first_row_gives_up_everything(tmp_path: Path, open_store: OpenStore) -> None:
    with open_store(tmp_path) as store:
        checkpoint = store.position()
        _append(store, 0, 1)
    assert checkpoint == 0
    with open_store(tmp_path) as resumed:
        resumed.supersede_from(checkpoint, step=0)
    assert _ids(tmp_path) == []


def test_blocks_that_were_sealed_after_the_checkpoint_are_superseded_as_well(tmp_path: Path) -> None:
    with RolloutStore(tmp_path, settings=small_blocks(block_mb=0.005)) as store:
        _append(store, *range(5))
        checkpoint = store.position()
        _append(store, *range(5, 10))
    assert all(block.is_sealed for block in find_blocks(tmp_path))
    with RolloutStore(tmp_path) as resumed:
        resumed.supersede_from(checkpoint, step=1)
        _append(resumed, 5, 6)
    assert _ids(tmp_path) == [0, 1, 2, 3, 4, 5, 6]
    assert [s.row.seq for s in scan_groups(tmp_path, with_superseded=True)] == list(range(12))


def test_a_store_whose_newest_blocks_were_removed_by_hand_never_uses_a_seq_of_the_checkpoint_twice(
    tmp_path: Path, open_store: OpenStore
) -> None:
    with open_store(tmp_path) as store:
        _append(store, 0, 1, 2)
        checkpoint = store.position()
    for path in tmp_path.glob("block-*"):
        path.unlink()
    with open_store(tmp_path) as killed_at_once:
        killed_at_once.supersede_from(checkpoint, step=1)
    with open_store(tmp_path) as resumed:
        assert resumed.position() == 3
        resumed.supersede_from(checkpoint, step=1)
        _append(resumed, 3)
    assert [(row.seq, row.group_id) for row in read_groups(tmp_path)] == [(3, 3)]


def test_a_torn_branch_is_no_branch_and_a_damaged_one_is_an_error(tmp_path: Path) -> None:
    whole = Branch(step=1, from_seq=5, until_seq=9)
    add_branch(tmp_path, whole)
    path = tmp_path / "branches.jsonl"
    path.write_bytes(path.read_bytes() + b'{"step": 2, "from')
    assert read_branches(tmp_path) == [whole]
    add_branch(tmp_path, whole)
    assert read_branches(tmp_path) == [whole, whole]
    path.write_bytes(b'{"step": 1}\n')
    with pytest.raises(RunError, match=r"branches\.jsonl:1"):
        read_branches(tmp_path)
