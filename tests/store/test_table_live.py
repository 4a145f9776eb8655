"""A table of a store that is being written, sealed, cut back, killed or damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_async.errors import RunError
from grpo_async.store import table as table_module
from grpo_async.store.query import parse_query
from grpo_async.store.table import RolloutTable
from tests.store.builders import (
    OpenStore,
    append_simple,
    seal_all,
    write_groups,
)

_WRITER = """
import sys
from pathlib import Path
from grpo_async.records import GroupStatus
from grpo_async.store import RolloutStore

from tests.store.builders import append_simple, small_blocks
with RolloutStore(Path(sys.argv[1]), settings=small_blocks(block_mb=0.02)) as store:
    for group_id in range(int(sys.argv[2])):
        append_simple(store, group_id, step=group_id, rewards=(0.0, 1.0))
        print(group_id, flush=True)
"""


def _writer(folder: Path, groups: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(folder), str(groups)], stdout=subprocess.PIPE, text=True
    )


@pytest.mark.parametrize("made", [True, False])
def test_an_empty_store_has_no_rows_and_says_so(tmp_path: Path, made: bool) -> None:
    folder = tmp_path / "rollouts"
    if made:
        folder.mkdir()
    with RolloutTable(folder) as table:
        assert table.count().rollouts == 0
        assert not table.page()
        assert not table.group_page()
        assert table.count(parse_query("rewards['exact']<1 and text like 'x' and columns['a']='1'")).groups == 0
        (note,) = table.notes
        assert ("holds no rollouts yet" if made else "is not there") in note
        assert not table.refresh()
        with pytest.raises(RunError, match="no rollout a"):
            table.rollout("a")


def test_a_table_follows_a_writer_in_another_process_that_seals(tmp_path: Path) -> None:
    """Whole groups only, each once, and all of them in the end; a search too."""
    folder = tmp_path / "rollouts"
    with _writer(folder, 120) as writer, RolloutTable(folder) as table:
        assert writer.stdout is not None
        query = parse_query("text ilike '%what is%' and reward=1")
        seen = 0
        for line in writer.stdout:
            if int(line) % 4:
                continue
            table.refresh()
            counts = table.count()
            assert counts.rollouts == 2 * counts.groups
            assert counts.groups > int(line)  # what was flushed before is there
            assert table.count(query).rollouts == counts.groups
            assert table.group(int(line)).group_id == int(line)
            assert counts.groups >= seen
            seen = counts.groups
        assert writer.wait(timeout=60) == 0
        table.refresh()
        assert (table.count().rollouts, table.count(query).rollouts) == (240, 120)
        assert [group["group_id"] for group in table.group_page(sort="seq", limit=200)] == list(range(120))
        assert len(list(folder.glob("*.parquet"))) > 2
        assert table.notes == []


@pytest.mark.parametrize(("owner", "name"), [(table_module, "find_blocks"), (RolloutTable, "refresh")])
def test_a_block_that_is_sealed_while_it_is_read_is_found_by_its_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, name: str
) -> None:
    """After the listing, or after its lines were read: each group is there once."""
    write_groups(tmp_path, 0)
    original = getattr(owner, name)

    def sealed_after(*arguments: Any) -> Any:
        found = original(*arguments)
        seal_all(tmp_path)
        return found

    monkeypatch.setattr(owner, name, sealed_after)
    with RolloutTable(tmp_path) as table:
        assert table.group(0).group_id == 0
        assert table.count().groups == 1


def test_a_block_that_was_deleted_to_make_room_goes(tmp_path: Path) -> None:
    for group_id in range(3):
        write_groups(tmp_path, group_id, seal=True, text=f"prompt {group_id}")
    with RolloutTable(tmp_path) as table:
        assert table.count(parse_query("text like '%prompt%'")).groups == 3
        min(tmp_path.glob("*.parquet")).unlink()
        assert table.group(2).group_id == 2
        with pytest.raises(RunError, match="no group with seq 0"):  # it goes between question and answer
            table.group_at(0)
        assert table.count(parse_query("text like '%prompt%'")).groups == 2
        with pytest.raises(RunError, match="no group 0"):
            table.group(0)


def test_a_line_that_is_being_written_is_not_called_torn(open_store: OpenStore, tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        append_simple(store, 0)
        (lines,) = tmp_path.glob("*.jsonl")
        with lines.open("ab") as file:
            file.write(lines.read_bytes()[:100])
        with RolloutTable(tmp_path) as table:
            assert table.notes == []
            assert table.count().groups == 1
    with RolloutTable(tmp_path) as table:  # nobody writes on
        (torn,) = table.notes
        assert lines.name in torn
        assert "100 bytes are left out" in torn
        assert table.damage == []


@pytest.mark.parametrize("damage", [b"{broken\n", b'{"schema":5}\n', b"\xff\xfe\n", b"\n", b"[]\n"])
def test_a_damaged_line_costs_its_group_and_is_named(tmp_path: Path, damage: bytes) -> None:
    write_groups(tmp_path, 0, 1, 2)
    (path,) = tmp_path.glob("*.jsonl")
    first, _, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage + third)
    with RolloutTable(tmp_path) as table:
        assert [group["group_id"] for group in table.group_page(sort="seq")] == [0, 2]
        assert table.group(2).group_id == 2
        (note,) = table.damage
        assert f"left out 1 damaged line of {path}" in note
        assert table.notes[0] == note


def test_a_damaged_parquet_file_costs_its_groups_and_is_named(tmp_path: Path) -> None:
    for group_id in range(3):
        write_groups(tmp_path, group_id, seal=True)
    path = sorted(tmp_path.glob("*.parquet"))[1]
    whole = path.read_bytes()
    path.write_bytes(whole[:2000])
    with RolloutTable(tmp_path) as table:
        assert [group["group_id"] for group in table.group_page(sort="seq")] == [0, 2]
        assert table.count(parse_query("text ilike '%what is%'")).groups == 2
        (note,) = table.damage
        assert str(path) in note
        assert "restore it from a copy, or remove it" in note
        assert not table.refresh()
        path.write_bytes(whole)  # restored
        assert table.refresh()
        assert (table.damage, table.count().groups) == ([], 3)


@pytest.mark.parametrize("name", ["a[1]", "it's a[b]*? q\"uote ünï"])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    """Taken for a pattern it would be read from `a1`, which holds something else."""
    write_groups(tmp_path / "a1", 7, seal=True)
    write_groups(tmp_path / name, 0, seal=True)
    write_groups(tmp_path / name, 1)
    with RolloutTable(tmp_path / name) as table:
        assert (table.damage, [each["group_id"] for each in table.group_page()]) == ([], [1, 0])
        assert table.count(parse_query("text ilike '%what%'")).rollouts == 4
        assert [table.group(group_id).group_id for group_id in (0, 1)] == [0, 1]


def test_damaged_metadata_and_a_store_of_another_version_are_refused(tmp_path: Path) -> None:
    write_groups(tmp_path, 0)
    path = tmp_path / "store.json"
    path.write_text(path.read_text().replace('"schema": 5', '"schema": 9'))
    with pytest.raises(RunError, match=r"has format 9 of the rollout store, this version reads format 5"):
        RolloutTable(tmp_path)
    path.write_text("{")
    with pytest.raises(RunError, match=r"store\.json is damaged: .*; remove it to read the rollouts"):
        RolloutTable(tmp_path)
