"""The writer: whole lines in the order of seq, whatever interrupts it; and what a resume leaves behind."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.sections import LaunchSection
from grpo_async.errors import RunError
from grpo_async.records import GroupStatus
from grpo_async.store import RolloutStore, rollout_store
from grpo_async.store.files import find_blocks, read_metadata
from grpo_async.tracking import trackers
from grpo_async.utils import files as line_files
from tests.store.builders import (
    append,
    append_simple,
    build_group,
    build_rollout,
    build_stats,
    small_blocks,
    write_groups,
)
from tests.support.stored import LineStore, read_groups
from tests.support.waiting import eventually

FIRST_BLOCK = "block-000000000000.jsonl"


def _ids(folder: Path) -> list[int]:
    return [row.group_id for row in read_groups(folder)]


def _seqs(folder: Path) -> list[tuple[int, int]]:
    return [(row.seq, row.group_id) for row in read_groups(folder)]


def _append(store: RolloutStore, *group_ids: int, status: GroupStatus = GroupStatus.TRAINED) -> None:
    """Without waiting for the disk."""
    for group_id in group_ids:
        append(store, build_group(group_id, [build_rollout(f"{group_id}-0")]), [], status, 1)


def test_a_group_can_be_read_as_soon_as_it_is_flushed(tmp_path: Path) -> None:
    with LineStore(tmp_path / "rollouts") as store:
        for group_id in range(3):
            _append(store, group_id)
            store.flush()
            assert _ids(tmp_path / "rollouts") == list(range(group_id + 1))
            assert store.position() == group_id + 1
    assert _seqs(tmp_path / "rollouts") == [(0, 0), (1, 1), (2, 2)]
    with pytest.raises(RunError, match="is closed; group 3 was not written"):
        _append(store, 3)
    assert (tmp_path / "rollouts").stat().st_mode & 0o777 == 0o700
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "rollouts").iterdir()}
    assert modes == dict.fromkeys((FIRST_BLOCK, "store.json", "writer.lock"), 0o600)


def test_the_statistics_of_the_trainer_may_be_switched_off(tmp_path: Path) -> None:
    with LineStore(tmp_path, settings=small_blocks(token_stats=False)) as store:
        group = build_group(1, [build_rollout("1-0")])
        append(store, group, [], GroupStatus.TRAINED, 1, stats={"1-0": build_stats(3)})
    assert read_groups(tmp_path)[0].rollouts[0].weights is None


# -- torn and damaged lines


def test_a_torn_last_line_is_skipped_noted_and_cut_off_by_the_next_writer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_groups(tmp_path, 0, 1)
    block = tmp_path / FIRST_BLOCK
    block.write_bytes(block.read_bytes()[:-10])  # as after a kill in the middle of a write
    assert _ids(tmp_path) == [0]
    with RolloutStore(tmp_path) as again:
        assert again.position() == 2  # the torn one had a seq
        append_simple(again, 2)
    assert f"{FIRST_BLOCK}: a kill had torn its last line" in caplog.text
    assert _seqs(tmp_path) == [(0, 0), (2, 2)]
    assert {path.name for path in tmp_path.glob("block-*")} == {
        "block-000000000000-000000000000.parquet",
        "block-000000000002-000000000002.parquet",
    }
    assert read_metadata(tmp_path).num_lost == 1


@pytest.mark.parametrize("content", [b"", b'{"schema":5,"se'])
def test_a_block_without_a_whole_line_is_removed_and_its_name_not_used_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FIRST_BLOCK).write_bytes(content)
    assert _ids(tmp_path) == []
    write_groups(tmp_path, 5)
    assert _seqs(tmp_path) == [(bool(content), 5)]
    assert not any("max_gb" in note for note in read_metadata(tmp_path).notes(tmp_path))  # nothing was deleted


def test_a_damaged_line_in_the_middle_is_an_error_with_file_and_line_and_is_not_lost_by_sealing(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_groups(tmp_path, 0, 1, 2)
    block = tmp_path / FIRST_BLOCK
    lines = block.read_bytes().split(b"\n")
    damaged = b"\n".join([lines[0], lines[1][:40], *lines[2:]])
    block.write_bytes(damaged)
    with pytest.raises(RunError, match=r"left out 1 damaged line of .*block-000000000000\.jsonl"):
        _ids(tmp_path)
    with RolloutStore(tmp_path) as again:
        assert again.position() == 3
        append_simple(again, 3)
    assert f"{FIRST_BLOCK} stays as JSON lines, which loses nothing: cannot seal" in capfd.readouterr().err
    assert block.read_bytes() == damaged


def test_threads_do_not_mix_their_lines(tmp_path: Path) -> None:
    ids = {first: range(first, first + 40) for first in (0, 100, 200, 300)}
    with LineStore(tmp_path, settings=small_blocks(block_mb=0.02)) as store:
        threads = [threading.Thread(target=_append, args=(store, *ids[first])) for first in ids]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=30)
    rows = read_groups(tmp_path)
    assert [row.seq for row in rows] == list(range(160))
    for first in ids:
        assert [row.group_id for row in rows if row.group_id in ids[first]] == list(ids[first])


# -- what cannot be written


def _full(descriptor: int, data: bytes, *, write: Callable[[int, bytes], int] = os.write) -> int:
    """A full disk takes half of a line, half of the rest, and so on to its last bytes."""
    if len(data) < 20:
        raise OSError(errno.ENOSPC, "No space left on device")
    return write(descriptor, data[: len(data) // 2])


def test_a_failed_write_is_a_clear_error_of_the_next_call_and_nothing_else_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_async.store.rollout_store._DISK_FULL_TIMEOUT_S", 0.0)
    with LineStore(tmp_path) as store:
        append_simple(store, 0)
        with monkeypatch.context() as full:
            full.setattr(line_files.os, "write", _full)
            _append(store, 1)
            with pytest.raises(RunError, match=r"cannot write rollouts to .*: No space left .* Group 1 is lost"):
                store.flush()
        assert _ids(tmp_path) == [0]
        append_simple(store, 2)
    assert _seqs(tmp_path) == [(0, 0), (2, 2)]
    assert len(find_blocks(tmp_path)) == 1, "half of a line is cut back"
    notes = read_metadata(tmp_path).notes(tmp_path)
    assert "missing: 1 group that a full disk or a kill kept from being written" in notes
    monkeypatch.setattr(line_files.os, "write", _full)
    with pytest.raises(RunError, match="Group 3 is lost"), LineStore(tmp_path) as store:
        _append(store, 3)  # closing raises, too


def test_a_group_waits_for_room_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grpo_async.store.rollout_store._DISK_FULL_RETRY_S", 0.01)
    with LineStore(tmp_path) as store:
        with monkeypatch.context() as full:
            full.setattr(line_files.os, "write", _full)
            _append(store, 0, 1)
            assert eventually(lambda: bool(caplog.messages))
        store.flush()
    assert _ids(tmp_path) == [0, 1]
    assert read_metadata(tmp_path).notes(tmp_path) == []


def test_a_disk_that_hangs_is_an_error_and_the_queue_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, write = threading.Event(), os.write

    def hanging(descriptor: int, data: Any) -> int:
        go_on.wait(timeout=30.0)
        return write(descriptor, data)

    monkeypatch.setattr(line_files.os, "write", hanging)
    with LineStore(tmp_path) as store:
        _append(store, *range(65))  # one is being written, 64 wait
        monkeypatch.setattr("grpo_async.store.rollout_store._WRITE_TIMEOUT_S", 0.1)
        monkeypatch.setattr("grpo_async.store.rollout_store._FLUSH_TIMEOUT_S", 0.1)
        with pytest.raises(RunError, match=r"cannot write group 65: .* has taken nothing for 0 s; check its disk"):
            _append(store, 65)
        with pytest.raises(RunError, match="cannot write 65 groups: "):
            store.position()
        go_on.set()
        monkeypatch.setattr("grpo_async.store.rollout_store._FLUSH_TIMEOUT_S", 30.0)
    assert _ids(tmp_path) == list(range(65))


def test_closing_fits_into_the_time_that_a_stop_has() -> None:
    ends = rollout_store._FLUSH_TIMEOUT_S + rollout_store.SEAL_TIMEOUT_S + trackers._CLOSE_TIMEOUT_S
    assert ends < LaunchSection().stop_timeout_s


# -- sampling


def test_sampling_takes_about_its_fraction_always_the_same_groups_and_every_failed_or_stale_one(tmp_path: Path) -> None:
    found = []
    for folder in (tmp_path / "a", tmp_path / "b"):
        with LineStore(folder, settings=small_blocks(sample_rate=0.25, block_mb=100)) as store:
            _append(store, *range(400))
            _append(store, *range(400, 410), status=GroupStatus.FAILED)
            _append(store, *range(410, 420), status=GroupStatus.STALE)
        found.append(_ids(folder))
    assert found[0] == found[1]
    assert found[0][-20:] == list(range(400, 420))
    assert 90 < len(found[0]) < 150
    (note,) = read_metadata(tmp_path / "a").notes(tmp_path / "a")
    assert note == "record.rollouts.sample_rate = 0.25 left out some of the groups"


# -- what a run wrote behind the checkpoint that it went on from is no part of it; nothing is removed


def test_the_same_checkpoint_may_be_gone_on_from_again_and_again(tmp_path: Path) -> None:
    with LineStore(tmp_path) as store:
        _append(store, 0)
        checkpoint = store.position()
        _append(store, 1)
    for group_id in (10, 11):
        with LineStore(tmp_path) as resumed:
            resumed.supersede_from(checkpoint, step=1)
            _append(resumed, group_id)
    assert _ids(tmp_path) == [0, 11]
    with LineStore(tmp_path) as resumed:
        later = resumed.position()
        _append(resumed, 12)
    assert later == 4  # 0, 1, 10, 11
    with LineStore(tmp_path) as resumed:
        resumed.supersede_from(later, step=2)
        _append(resumed, 13)
    assert _seqs(tmp_path) == [(0, 0), (3, 11), (5, 13)]


def test_a_fork_misses_nothing_of_what_its_parent_has(tmp_path: Path) -> None:
    with LineStore(tmp_path) as forked:
        forked.supersede_from(96, step=6)
        _append(forked, 1)
    assert _seqs(tmp_path) == [(96, 1)]
    assert not read_metadata(tmp_path).notes(tmp_path)
