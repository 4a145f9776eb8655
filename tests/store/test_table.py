"""Pages of a store, also of one that is being written, sealed, cut back, killed or damaged."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from grpo_async.errors import RunError
from grpo_async.records import GroupStatus
from grpo_async.store import table as table_module
from grpo_async.store.query import QueryError, parse_query
from grpo_async.store.table import RolloutTable
from tests.store.builders import append, append_simple, build_group, build_rollout, seal_all, write_groups
from tests.support.stored import LineStore

_WRITER = """
import sys
from pathlib import Path
from grpo_async.records import GroupStatus
from grpo_async.store import RolloutStore

from tests.store.builders import append_simple, small_blocks
with RolloutStore(Path(sys.argv[1]), settings=small_blocks(block_mb=0.02)) as store:
    for group_id in range(120):
        append_simple(store, group_id, step=group_id, rewards=(0.0, 1.0))
        print(group_id, flush=True)
"""


def test_a_page_is_a_window_of_the_sorted_rollouts(tmp_path: Path) -> None:
    """The last group has no reward."""
    with LineStore(tmp_path) as store:
        for group_id, rewards in enumerate([(0.0, 0.5), (0.25, 0.25), (0.0, 1.0)]):
            append_simple(store, group_id, rewards=rewards)
        append(store, build_group(3, [build_rollout("3-0")]), [], GroupStatus.CANCELLED, None)
    with RolloutTable(tmp_path) as table:

        def ids(sort: str, offset: int = 0, limit: int = 50) -> list[str]:
            return [each["rollout_id"] for each in table.page(sort=sort, offset=offset, limit=limit)]

        newest = ["3-0", "2-0", "2-1", "1-0", "1-1", "0-0", "0-1"]
        assert ids("-seq") == newest
        assert ids("-seq", 2, 3) == newest[2:5]
        assert ids("-seq", 100) == []
        # what has no reward comes last either way; of equal ones the newest first
        assert ids("reward") == ["2-0", "0-0", "1-0", "1-1", "0-1", "2-1", "3-0"]
        assert ids("-reward") == ["2-1", "0-1", "1-0", "1-1", "2-0", "0-0", "3-0"]
        assert ids("-reward, seq")[4:6] == ["0-0", "2-0"]
        for sort in ("rewrd", "-", "", "seq; DROP TABLE unsealed", "columns['a']"):
            with pytest.raises(QueryError):
                table.page(sort=sort)
            with pytest.raises(QueryError):
                table.group_page(sort=sort)


def test_superseded_rows_are_left_out_unless_asked_for(tmp_path: Path) -> None:
    """Groups 1 and 2 were written after the checkpoint; a resume makes 1 anew."""
    with LineStore(tmp_path) as store:
        append_simple(store, 0)
        position = store.position()
        append_simple(store, 1, rewards=(0.0, 0.0), step=2)
        append_simple(store, 2, step=2)
    with RolloutTable(tmp_path) as table:
        assert table.count().groups == 3
        with LineStore(tmp_path) as store:
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


def test_a_store_that_is_not_there_yet_has_no_rows_and_says_so(tmp_path: Path) -> None:
    with RolloutTable(tmp_path / "rollouts") as table:
        assert not table.page()
        assert table.count(parse_query("rewards['exact']<1 and text like 'x' and columns['a']='1'")).groups == 0
        (note,) = table.notes
        assert "is not there" in note


def test_a_table_follows_a_writer_in_another_process_that_seals(tmp_path: Path) -> None:
    """Whole groups only, each once, and all of them in the end; a search too."""
    folder = tmp_path / "rollouts"
    command = [sys.executable, "-c", _WRITER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as writer, RolloutTable(folder) as table:
        assert writer.stdout is not None
        query = parse_query("text ilike '%what is%' and reward=1")
        for line in writer.stdout:
            if int(line) % 4:
                continue
            table.refresh()
            counts = table.count()
            assert counts.rollouts == 2 * counts.groups
            assert counts.groups > int(line)  # what was flushed before is there
            assert table.count(query).rollouts == counts.groups
            assert table.group(int(line)).group_id == int(line)
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


def test_a_line_that_is_being_written_is_not_called_torn(tmp_path: Path) -> None:
    with LineStore(tmp_path) as store:
        append_simple(store, 0)
        (lines,) = tmp_path.glob("*.jsonl")
        with lines.open("ab") as file:
            file.write(lines.read_bytes()[:100])
        with RolloutTable(tmp_path) as table:
            assert table.notes == []
            assert table.count().groups == 1
    with RolloutTable(tmp_path) as table:  # nobody writes on
        assert ("100 bytes are left out" in table.notes[0], table.damage) == (True, [])


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


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    """Taken for a pattern it would be read from `it's a1`, which holds something else."""
    write_groups(tmp_path / "it's a1", 7, seal=True)
    write_groups(tmp_path / "it's a[1]", 0, seal=True)
    with RolloutTable(tmp_path / "it's a[1]") as table:
        assert (table.damage, [each["group_id"] for each in table.group_page()]) == ([], [0])


def test_damaged_metadata_and_a_store_of_another_version_are_refused(tmp_path: Path) -> None:
    write_groups(tmp_path, 0)
    path = tmp_path / "store.json"
    path.write_text(path.read_text().replace('"schema": 5', '"schema": 9'))
    with pytest.raises(RunError, match=r"has format 9 of the rollout store, this version reads format 5"):
        RolloutTable(tmp_path)
    path.write_text("{")
    with pytest.raises(RunError, match=r"store\.json is damaged: .*; remove it to read the rollouts"):
        RolloutTable(tmp_path)
