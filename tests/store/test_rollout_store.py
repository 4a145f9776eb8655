"""The writer: whole lines in the order of seq, whatever interrupts it."""

from __future__ import annotations

import errno
import json
import logging
import threading
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from grpo_async.config.sections import LaunchSection
from grpo_async.errors import RunError
from grpo_async.records import GroupStatus, RolloutGroup
from grpo_async.store import RolloutStore, read_groups, rollout_store, sealer
from grpo_async.store.blocks import find_blocks, torn_bytes
from grpo_async.store.metadata import read_metadata
from grpo_async.store.rollout_store import all_groups
from grpo_async.tracking import trackers
from tests.store.builders import (
    OpenStore,
    append_simple,
    build_figures,
    build_group,
    build_rollout,
    build_sample,
    small_blocks,
)
from tests.support.waiting import eventually

FIRST_BLOCK = "block-000000000000.jsonl"


def _ids(folder: Path) -> list[int]:
    return [row.group_id for row in read_groups(folder)]


def _append(store: RolloutStore, group_id: int, status: GroupStatus = GroupStatus.TRAINED) -> None:
    """Without waiting for the disk."""
    store.append(build_group(group_id, [build_rollout(f"{group_id}-0")]), [], status, 1)


def test_a_group_can_be_read_as_soon_as_it_is_flushed(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    for group_id in range(3):
        _append(store, group_id)
        store.flush()
        assert _ids(tmp_path) == list(range(group_id + 1))
        assert store.position() == group_id + 1
    store.close()
    assert [row.seq for row in read_groups(tmp_path)] == [0, 1, 2]


def test_the_figures_of_the_trainer_are_stored_unless_they_are_switched_off(
    tmp_path: Path, open_store: OpenStore
) -> None:
    completion = build_rollout("1-0")
    for name, settings in (("on", small_blocks()), ("off", small_blocks(token_figures=False))):
        store = open_store(tmp_path / name, settings=settings)
        store.append(
            build_group(1, [completion]),
            [build_sample(1, completion, 1.0)],
            GroupStatus.TRAINED,
            1,
            figures={"1-0": build_figures(3)},
        )
        store.close()
    (on,), (off,) = read_groups(tmp_path / "on"), read_groups(tmp_path / "off")
    assert on.rollouts[0].weights == [1.0, 2.0, 3.0]
    assert off.rollouts[0].weights is off.rollouts[0].marks is None


def test_files_are_private(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path / "rollouts", settings=small_blocks(sample_rate=0.5))
    for group_id in range(4):
        append_simple(store, group_id)
    store.close()
    assert (tmp_path / "rollouts").stat().st_mode & 0o777 == 0o700
    names = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "rollouts").iterdir()}
    assert set(names.values()) == {0o600}
    assert "store.json" in names


# -- torn and damaged lines


def test_a_torn_last_line_is_skipped_noted_and_cut_off_by_the_next_writer(
    tmp_path: Path, open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    append_simple(store, 0)
    append_simple(store, 1)
    store.close()
    block = tmp_path / FIRST_BLOCK
    whole = block.read_bytes().index(b"\n") + 1
    block.write_bytes(block.read_bytes()[:-10])  # as after a kill in the middle of a write
    assert torn_bytes(block) > 0
    assert _ids(tmp_path) == [0]
    again = RolloutStore(tmp_path)
    assert again.position() == 2  # the torn one had a seq
    append_simple(again, 2)
    with caplog.at_level(logging.WARNING):
        again.close()
    assert f"{FIRST_BLOCK}: a kill had torn its last line" in caplog.text
    assert [(row.seq, row.group_id) for row in read_groups(tmp_path)] == [(0, 0), (2, 2)]
    assert {path.name for path in tmp_path.glob("block-*")} == {
        "block-000000000000-000000000000.parquet",
        "block-000000000002-000000000002.parquet",
    }
    assert read_metadata(tmp_path).notes() == [
        f"a kill while writing: the last line was torn in {FIRST_BLOCK}; so many groups are missing"
    ]
    assert whole > 0


@pytest.mark.parametrize("content", [b"", b'{"schema":3,"se'])
def test_a_block_without_a_whole_line_is_removed_and_its_name_not_used_again(
    tmp_path: Path, open_store: OpenStore, content: bytes
) -> None:
    (tmp_path / FIRST_BLOCK).write_bytes(content)
    assert _ids(tmp_path) == []
    store = open_store(tmp_path)
    append_simple(store, 5)
    store.close()
    assert [(row.seq, row.group_id) for row in read_groups(tmp_path)] == [(bool(content), 5)]


def test_a_damaged_line_in_the_middle_is_an_error_with_file_and_line_and_is_not_lost_by_sealing(
    tmp_path: Path, open_store: OpenStore, caplog: pytest.LogCaptureFixture
) -> None:
    store = open_store(tmp_path)
    for group_id in range(3):
        append_simple(store, group_id)
    store.close()
    block = tmp_path / FIRST_BLOCK
    lines = block.read_bytes().split(b"\n")
    damaged = b"\n".join([lines[0], lines[1][:40], *lines[2:]])
    block.write_bytes(damaged)
    with pytest.raises(RunError, match=r"block-000000000000\.jsonl:2: the line is damaged"):
        _ids(tmp_path)
    with RolloutStore(tmp_path) as again:
        assert again.position() == 3
        append_simple(again, 3)
    assert f"{FIRST_BLOCK} stays as JSON lines: cannot seal" in caplog.text
    assert block.read_bytes() == damaged


# -- several writers


def test_threads_do_not_mix_their_lines(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path, settings=small_blocks(block_mb=0.02))

    def append_many(first: int) -> None:
        for group_id in range(first, first + 40):
            _append(store, group_id)

    threads = [threading.Thread(target=append_many, args=(first,)) for first in (0, 100, 200, 300)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    store.close()
    rows = list(read_groups(tmp_path))
    assert [row.seq for row in rows] == list(range(160))
    for base in (0, 100, 200, 300):
        assert [row.group_id for row in rows if base <= row.group_id < base + 100] == list(range(base, base + 40))


def test_a_closed_store_refuses_groups(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    store.close()
    store.close()
    with pytest.raises(RunError, match="is closed; group 0 was not written"):
        append_simple(store, 0)


# -- what cannot be written


class _FullDisk(FileIO):
    """Takes 200 bytes of a line, and no more; `truncates`: a file may be cut even so, as on a real full disk."""

    is_full = True
    truncates = True

    def write(self, data: Any) -> int:
        if not _FullDisk.is_full:
            return super().write(bytes(data)) or 0
        if len(data) < 200 or self.tell() % 1000 == 200:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(bytes(data)[: 200 - self.tell() % 1000 % 200]) or 0

    def truncate(self, size: int | None = None) -> int:
        if not _FullDisk.truncates:
            raise OSError(errno.EIO, "Input/output error")
        return super().truncate(size)


@pytest.mark.parametrize("truncates", [True, False])
def test_a_failed_write_is_a_clear_error_of_the_next_call_and_nothing_else_is_lost(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, truncates: bool
) -> None:
    monkeypatch.setattr("grpo_async.store.blocks.FileIO", _FullDisk)
    monkeypatch.setattr(_FullDisk, "truncates", truncates)
    monkeypatch.setattr(_FullDisk, "is_full", False)
    monkeypatch.setattr("grpo_async.store.rollout_store._ROOM_TIMEOUT_S", 0.0)
    store = open_store(tmp_path)
    append_simple(store, 0)
    monkeypatch.setattr(_FullDisk, "is_full", True)
    _append(store, 1)
    with pytest.raises(RunError, match=r"cannot write rollouts to .*: No space left on device; .* Group 1 is lost"):
        store.flush()
    assert _ids(tmp_path) == [0]
    monkeypatch.setattr(_FullDisk, "is_full", False)
    append_simple(store, 2)
    store.close()
    assert [(row.seq, row.group_id) for row in read_groups(tmp_path)] == [(0, 0), (2, 2)]
    assert len(find_blocks(tmp_path)) == (1 if truncates else 2)
    assert read_metadata(tmp_path).notes() == ["one group could not be written (see the log)"]


def test_a_group_waits_for_room_on_a_full_disk(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grpo_async.store.blocks.FileIO", _FullDisk)
    monkeypatch.setattr("grpo_async.store.rollout_store._ROOM_RETRY_S", 0.01)
    monkeypatch.setattr(_FullDisk, "is_full", True)
    store = open_store(tmp_path)
    _append(store, 0)
    _append(store, 1)
    assert eventually(lambda: bool(caplog.messages))
    monkeypatch.setattr(_FullDisk, "is_full", False)
    store.flush()
    store.close()
    assert _ids(tmp_path) == [0, 1]
    assert read_metadata(tmp_path).notes() == []


def test_a_block_whose_first_line_failed_is_given_up_and_the_next_line_names_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_async.store.blocks.FileIO", _FullDisk)
    monkeypatch.setattr("grpo_async.store.rollout_store._ROOM_TIMEOUT_S", 0.1)
    monkeypatch.setattr(_FullDisk, "is_full", True)
    store = RolloutStore(tmp_path)
    _append(store, 0)
    with pytest.raises(RunError, match="Group 0 is lost"):
        store.flush()
    assert find_blocks(tmp_path) == []
    monkeypatch.setattr(_FullDisk, "is_full", False)
    _append(store, 1)
    store.close()
    assert [path.name for path in tmp_path.glob("block-*")] == ["block-000000000001-000000000001.parquet"]
    assert _ids(tmp_path) == [1]


def test_what_was_not_sealed_at_the_end_is_sealed_later(tmp_path: Path) -> None:
    with RolloutStore(tmp_path, seals_at_close=False) as store:
        _append(store, 0)
    assert [path.name for path in tmp_path.glob("block-*")] == [FIRST_BLOCK]
    store.seal_rest(wait_s=30.0)
    assert [path.name for path in tmp_path.glob("block-*")] == ["block-000000000000-000000000000.parquet"]
    store.seal_rest(wait_s=30.0)
    assert _ids(tmp_path) == [0]


def test_the_error_comes_with_the_next_append_which_is_written_all_the_same(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("grpo_async.store.blocks.FileIO", _FullDisk)
    monkeypatch.setattr(_FullDisk, "is_full", True)
    monkeypatch.setattr("grpo_async.store.rollout_store._ROOM_TIMEOUT_S", 0.0)
    store = open_store(tmp_path)
    _append(store, 0)
    with store._changed:
        store._changed.wait_for(lambda: store._error is not None, timeout=10.0)
    monkeypatch.setattr(_FullDisk, "is_full", False)
    with pytest.raises(RunError, match="Group 0 is lost"):
        _append(store, 1)
    store.flush()
    assert _ids(tmp_path) == [1]


def test_closing_raises_what_could_not_be_written_unless_something_else_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("grpo_async.store.blocks.FileIO", _FullDisk)
    monkeypatch.setattr("grpo_async.store.rollout_store._ROOM_TIMEOUT_S", 0.1)
    with pytest.raises(RunError, match="Group 0 is lost"), RolloutStore(tmp_path / "a") as store:
        _append(store, 0)
    with pytest.raises(ZeroDivisionError), RolloutStore(tmp_path / "b") as store:
        _append_and_fail(store)
    assert "Group 0 is lost" in caplog.text


def _append_and_fail(store: RolloutStore) -> None:
    _append(store, 0)
    raise ZeroDivisionError


def test_a_group_that_cannot_be_made_into_a_line_is_named(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path)
    store.append(RolloutGroup(group_id=4, prompt=None, completions=[]), [], GroupStatus.TRAINED, 1)  # type: ignore[arg-type]
    with pytest.raises(RunError, match="group 4 cannot be stored: AttributeError"):
        store.flush()
    append_simple(store, 5)
    assert _ids(tmp_path) == [5]


def test_a_disk_that_hangs_is_an_error_and_the_queue_has_an_end(
    tmp_path: Path, open_store: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()

    class Hanging(FileIO):
        def write(self, data: Any) -> int:
            go_on.wait(timeout=30.0)
            return super().write(data) or 0

    monkeypatch.setattr("grpo_async.store.blocks.FileIO", Hanging)
    store = open_store(tmp_path)
    for group_id in range(65):  # one is being written, 64 wait
        _append(store, group_id)
    monkeypatch.setattr("grpo_async.store.rollout_store._WRITE_TIMEOUT_S", 0.1)
    monkeypatch.setattr("grpo_async.store.rollout_store._FLUSH_TIMEOUT_S", 0.1)
    with pytest.raises(RunError, match="has taken nothing for 0 s, group 65 not written; check its disk"):
        _append(store, 65)
    with pytest.raises(RunError, match="65 groups not written"):
        store.position()
    go_on.set()
    monkeypatch.setattr("grpo_async.store.rollout_store._FLUSH_TIMEOUT_S", 30.0)
    store.flush()
    assert _ids(tmp_path) == list(range(65))


def test_closing_fits_into_the_time_that_a_stop_has() -> None:
    ends = rollout_store._FLUSH_TIMEOUT_S + rollout_store._SEAL_AT_CLOSE_S + sealer._KILL_TIMEOUT_S + trackers._CLOSE_S
    assert ends < LaunchSection().stop_timeout_s


# -- sampling


def test_sampling_takes_about_its_share_always_the_same_groups_and_every_failed_or_stale_one(
    tmp_path: Path, open_store: OpenStore
) -> None:
    found = []
    for name in ("a", "b"):
        store = open_store(tmp_path / name, settings=small_blocks(sample_rate=0.25, block_mb=100))
        for group_id in range(400):
            _append(store, group_id)
        for group_id in range(400, 450):
            _append(store, group_id, GroupStatus.FAILED if group_id % 2 else GroupStatus.STALE)
        _append(store, 450, GroupStatus.FILTERED)
        store.close()
        found.append(_ids(tmp_path / name))
    assert found[0] == found[1]
    assert set(range(400, 450)) <= set(found[0])
    trained = [group_id for group_id in found[0] if group_id < 400]
    assert 70 < len(trained) < 130
    assert read_metadata(tmp_path / "a").sampled_out["trained"] == 400 - len(trained)
    (note,) = read_metadata(tmp_path / "a").notes()
    assert note.startswith("record.rollouts.sample_rate = 0.25 left out ")
    assert f"{400 - len(trained)} trained" in note


@pytest.mark.parametrize(("rate", "expected"), [(0.0, []), (1.0, list(range(20)))])
def test_the_ends_of_the_sampling_rate(tmp_path: Path, open_store: OpenStore, rate: float, expected: list[int]) -> None:
    store = open_store(tmp_path / "rollouts", settings=small_blocks(sample_rate=rate))
    for group_id in range(20):
        _append(store, group_id)
    store.close()
    assert _ids(tmp_path / "rollouts") == expected
    assert read_metadata(tmp_path / "rollouts").sampled_out.get("trained", 0) == 20 - len(expected)


def test_a_resume_counts_on_from_what_was_sampled_out_before_its_checkpoint(
    tmp_path: Path, open_store: OpenStore
) -> None:
    settings = small_blocks(sample_rate=0.0)
    store = open_store(tmp_path, settings=settings)
    for group_id in range(3):
        _append(store, group_id)
    position = store.position()
    _append(store, 3)
    store.close()
    resumed = open_store(tmp_path, settings=settings)
    resumed.supersede_from(position, step=1)
    for group_id in range(3, 5):
        _append(resumed, group_id)
    resumed.close()
    assert read_metadata(tmp_path).sampled_out == {"trained": 5}


def test_what_was_sampled_out_after_a_checkpoint_without_any_is_not_counted_twice(
    tmp_path: Path, open_store: OpenStore
) -> None:
    settings = small_blocks(sample_rate=0.0)
    store = open_store(tmp_path, settings=settings)
    _append(store, 0, GroupStatus.FAILED)  # always stored
    position = store.position()
    for group_id in range(1, 4):
        _append(store, group_id)
    _append(store, 4, GroupStatus.FAILED)
    store.position()
    store.close()
    assert read_metadata(tmp_path).sampled_out == {"trained": 3}
    for _ in range(2):
        with open_store(tmp_path, settings=settings) as resumed:
            resumed.supersede_from(position, step=1)
            for group_id in range(1, 4):
                _append(resumed, group_id)
        assert read_metadata(tmp_path).sampled_out == {"trained": 3}


def test_a_run_that_begins_anew_before_its_first_checkpoint_counts_anew(tmp_path: Path, open_store: OpenStore) -> None:
    for _ in range(2):
        with open_store(tmp_path, settings=small_blocks(sample_rate=0.0)) as store:
            store.supersede_from(0, step=0)
            _append(store, 0)
        assert read_metadata(tmp_path).sampled_out == {"trained": 1}


def test_no_group_of_an_evaluation_is_sampled_out() -> None:
    settings = small_blocks(sample_rate=0.1, max_gb=3.0)
    assert all_groups(settings).sample_rate == 1.0
    assert all_groups(settings).max_gb == 3.0


def test_damaged_metadata_are_an_error_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_text("{")
    with pytest.raises(RunError, match=r"store\.json is damaged: .*; remove it to read the rest"):
        RolloutStore(tmp_path).position()
    (tmp_path / "store.json").write_text(json.dumps({"torn": ["a"], "of a later version": 1}))
    assert read_metadata(tmp_path).torn == ["a"]
