"""A table of a store that is being written, sealed, cut back, killed or damaged."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from grpo_async.errors import RunError
from grpo_async.records import GroupStatus
from grpo_async.store import RolloutStore
from grpo_async.store.blocks import open_name, sealed_name
from grpo_async.store.index import Index, Sql
from grpo_async.store.query import both, parse_query
from grpo_async.store.schema import OLD_NAMES, OLD_SCHEMA, SCHEMA
from grpo_async.store.table import RolloutTable
from tests.store.builders import (
    OpenStore,
    append_simple,
    build_branched_rollout,
    build_group,
    build_rollout,
    build_stats,
    seal_all,
    small_blocks,
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
    with RolloutTable.open(folder) as table:
        assert table.count().rollouts == 0
        assert not table.page()
        assert not table.group_page()
        assert not table.by_step()
        assert table.count(parse_query("rewards['exact']<1 and text like 'x' and columns['a']='1'")).groups == 0
        assert table.histogram("reward").counts == []
        assert list(table.dump_json()) == []
        assert not [*table.reward_names(), *table.column_names(), *table.same_prompt("00")]
        assert table.extremes().best == []
        (note,) = table.notes
        assert ("holds no rollouts yet" if made else "is not there") in note
        assert not table.refresh()
        with pytest.raises(RunError, match="it holds none"):
            table.rollout("a")


def test_a_table_follows_a_writer_in_another_process_that_seals(tmp_path: Path) -> None:
    """Whole groups only, each once, and all of them in the end; a search too."""
    folder = tmp_path / "rollouts"
    with _writer(folder, 120) as writer, RolloutTable.open(folder) as table:
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
        assert [group.group_id for group in table.group_page(sort="seq", limit=200)] == list(range(120))
        assert len(list(folder.glob("*.parquet"))) > 2
        assert table.notes == []


def test_only_what_is_new_is_read(open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = Index._insert_lines

    def noted(self: Index, lines: Sequence[bytes]) -> int:
        read.append(sum(map(len, lines)))
        return original(self, lines)

    monkeypatch.setattr(Index, "_insert_lines", noted)
    store = open_store(tmp_path)
    append_simple(store, 0)
    (lines,) = tmp_path.glob("*.jsonl")
    first = lines.stat().st_size
    with RolloutTable.open(tmp_path) as table:
        generation = table.generation
        assert not table.refresh()
        assert table.generation == generation
        append_simple(store, 1)
        assert table.refresh()
        assert table.generation > generation
        assert read == [first, lines.stat().st_size - first]
        append_simple(store, 2)  # the block grows before it is sealed
        store.close()
        seal_all(tmp_path)
        assert table.refresh()
        assert not table.refresh()
        assert [group.group_id for group in table.group_page(sort="seq")] == [0, 1, 2]
        assert [each.rollout_id for each in table.group(2).rollouts] == ["2-0", "2-1"]
        assert len(list(table.dump_json())) == 6
        assert len(read) == 2


@pytest.mark.parametrize("name", ["_list", "_insert_lines"])
def test_a_block_that_is_sealed_while_it_is_read_is_found_by_its_new_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """After the listing, or after its lines were ingested: each group is there once."""
    write_groups(tmp_path, 0)
    original = getattr(Index, name)

    def sealed_after(*arguments: Any) -> Any:
        found = original(*arguments)
        seal_all(tmp_path)
        return found

    monkeypatch.setattr(Index, name, sealed_after)
    with RolloutTable.open(tmp_path) as table:
        assert table.group(0).group_id == 0
        assert (table.count().groups, len(list(table.dump_json()))) == (1, 2)


def test_a_block_that_the_listing_misses_is_not_taken_for_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listing a folder is no moment: one that is renamed meanwhile may be in it under neither name."""
    write_groups(tmp_path, 0)
    with RolloutTable.open(tmp_path) as table:
        original, calls = Index._list, []

        def half_listed(self: Index) -> object:
            calls.append(1)
            return {} if len(calls) == 1 else original(self)

        monkeypatch.setattr(Index, "_list", half_listed)
        assert not table.refresh()
        assert (table.count().groups, len(calls)) == (1, 2)


def test_a_block_that_was_deleted_to_make_room_goes(tmp_path: Path) -> None:
    for group_id in range(3):
        write_groups(tmp_path, group_id, seal=True, text=f"prompt {group_id}")
    with RolloutTable.open(tmp_path) as table:
        assert table.count(parse_query("text like '%prompt%'")).groups == 3
        min(tmp_path.glob("*.parquet")).unlink()
        assert table.group(2).group_id == 2
        with pytest.raises(RunError):  # it goes between question and answer
            table._whole(0)
        assert table.count(parse_query("text like '%prompt%'")).groups == 2
        with pytest.raises(RunError, match="no group 0"):
            table.group(0)


def test_after_a_kill_whole_groups_are_there_and_a_torn_line_is_said(tmp_path: Path) -> None:
    folder = tmp_path / "rollouts"
    with _writer(folder, 10_000) as writer:
        assert writer.stdout is not None
        for line in writer.stdout:
            if int(line) >= 30:
                break
        os.kill(writer.pid, signal.SIGKILL)
    newest = max(folder.glob("*.jsonl"), default=None) or folder / f"block-{10**6:012d}.jsonl"
    with newest.open("ab") as file:
        file.write(b'{"schema":5,"seq":99,"gr')
    with RolloutTable.open(folder) as table:
        counts = table.count()
        assert counts.groups >= 31
        assert counts.rollouts == 2 * counts.groups
        torn, killed = table.notes
        assert newest.name in torn
        assert "24 bytes are left out" in torn
        assert "was killed: groups that it had not written yet are missing" in killed
        assert table.damage == []
    with RolloutStore(folder, settings=small_blocks()) as store:  # the next writer goes on behind it
        append_simple(store, 5000)
    with RolloutTable.open(folder) as table:
        assert table.group(5000).group_id == 5000
        assert any("torn" in note for note in table.notes)


def test_a_line_that_is_being_written_is_not_called_torn(open_store: OpenStore, tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        append_simple(store, 0)
        (lines,) = tmp_path.glob("*.jsonl")
        with lines.open("ab") as file:
            file.write(lines.read_bytes()[:100])
        with RolloutTable.open(tmp_path) as table:
            assert table.notes == []
            assert table.count().groups == 1
    with RolloutTable.open(tmp_path) as table:  # nobody writes on
        assert ["100 bytes are left out" in note for note in table.notes] == [True]


@pytest.mark.parametrize("damage", [b"{broken\n", b'{"schema":5}\n', b"\xff\xfe\n", b"\n", b"[]\n"])
def test_a_damaged_line_costs_its_group_and_is_named(tmp_path: Path, damage: bytes) -> None:
    write_groups(tmp_path, 0, 1, 2)
    (path,) = tmp_path.glob("*.jsonl")
    first, _, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage + third)
    with RolloutTable.open(tmp_path) as table:
        assert [group.group_id for group in table.group_page(sort="seq")] == [0, 2]
        assert table.group(2).group_id == 2
        (note,) = table.damage
        assert f"{path}:2:" in note
        assert table.notes[0] == note


@pytest.mark.parametrize("kind", ["cut", "garbage"])
def test_a_damaged_parquet_file_costs_its_groups_and_is_named(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[object] = []
    original = Index._insert_sealed

    def noted(self: Index, paths: Sequence[Path], before: Any) -> None:
        tried.append(paths)
        original(self, paths, before)

    monkeypatch.setattr(Index, "_insert_sealed", noted)
    for group_id in range(3):
        write_groups(tmp_path, group_id, seal=True)
    path = sorted(tmp_path.glob("*.parquet"))[1]
    whole = path.read_bytes()
    path.write_bytes({"cut": whole[:2000], "garbage": os.urandom(5000)}[kind])
    with RolloutTable.open(tmp_path) as table:
        assert [group.group_id for group in table.group_page(sort="seq")] == [0, 2]
        assert table.count(parse_query("text ilike '%what is%'")).groups == 2
        (note,) = table.damage
        assert str(path) in note
        assert "restore it from a copy, or remove it" in note
        tried.clear()
        assert not table.refresh()
        assert not tried  # not read again and again
        path.write_bytes(whole)  # restored
        assert table.refresh()
        assert (table.damage, table.count().groups) == ([], 3)


def test_damage_in_the_tokens_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with RolloutStore(tmp_path, seals_at_close=False) as store:
        for group_id in range(200):
            append_simple(store, group_id, num_tokens=50, answer=os.urandom(300).hex())
    seal_all(tmp_path)
    (path,) = tmp_path.glob("*.parquet")
    with RolloutTable.open(tmp_path) as table:
        assert table.count().groups == 200
        content = bytearray(path.read_bytes())
        place = len(content) // 3
        content[place : place + 20_000] = b"\xff" * 20_000
        path.write_bytes(content)
        with pytest.raises(RunError, match=path.name):
            list(table.dump_json())


def test_what_was_sampled_out_is_said(tmp_path: Path) -> None:
    with RolloutStore(tmp_path, settings=small_blocks(sample_rate=0.0), seals_at_close=False) as store:
        append_simple(store, 0)
        append_simple(store, 1, status=GroupStatus.STALE)
    with RolloutTable.open(tmp_path) as table:
        assert table.count().groups == 1
        assert ["sample_rate" in note for note in table.notes] == [True]
        (tmp_path / "store.json").write_text("{")
        assert ["store.json is damaged" in note for note in table.notes] == [True]
        assert table.count().groups == 1


def test_stores_of_other_versions_are_refused(tmp_path: Path) -> None:
    write_groups(tmp_path, 0)
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(path.read_bytes().replace(b'"schema":5', b'"schema":9'))
    with pytest.raises(RunError, match=r"has format 9 .*this version reads 4 and 5"):
        RolloutTable.open(tmp_path)


def test_a_store_of_the_version_before_is_read_by_the_names_of_today(tmp_path: Path, open_store: OpenStore) -> None:
    """A run that the older version began and this one goes on with: sealed blocks and lines, with a branch."""
    new, old = tmp_path / "new", tmp_path / "old"
    completions = [build_rollout("g0-r0"), build_branched_rollout("g0-r1")]
    stats = {"g0-r0": build_stats(3), "g0-r1": build_stats(3), "g0-r1.b2": build_stats(2)}
    for group_id in range(2):
        seal_all(new)
        with open_store(new) as store:
            store.append(replace(build_group(0, completions), group_id=group_id), GroupStatus.TRAINED, 1, stats=stats)
    shutil.copytree(new, old)
    sealed, lines = old / sealed_name(0, 0), old / open_name(1)
    named = ", ".join(f'"{name}" AS "{was}"' for name, was in OLD_NAMES.items())
    duckdb.execute(
        f"COPY (SELECT * EXCLUDE ({', '.join(OLD_NAMES)}), {named} FROM read_parquet('{new / sealed.name}')) "
        f"TO '{sealed}' (FORMAT parquet, KV_METADATA {{grpo_async_schema: '{OLD_SCHEMA}'}})"
    )
    text = lines.read_text()
    lines.write_text(text.replace(f'"schema":{SCHEMA}', f'"schema":{OLD_SCHEMA}').replace('"token_flags"', '"marks"'))
    for folder in (new, old):
        with RolloutTable.open(folder) as table:
            for seq in range(2):
                own, branched = table.group_at(seq).rollouts
                assert own.token_flags == branched.token_flags == [0, 1, 2]
                assert [branch.token_flags for branch in branched.branches] == [None, [0, 1]]
            found = table.page(parse_query("clipped and text like '%1 + 1%'"))
            assert [row.clipped_fraction for row in found] == [pytest.approx(2 / 3)] * 4
            assert len(list(table.dump_json(parse_query("masked_fraction = 0")))) == 4


@pytest.mark.parametrize("name", ["a[1]", "a?", "it's a[b]*?", 'q"uote ünï'])
def test_a_folder_may_have_any_name(tmp_path: Path, name: str) -> None:
    """Taken for a pattern it would be read from `a1`, which holds something else."""
    write_groups(tmp_path / "a1", 7, seal=True)
    write_groups(tmp_path / name, 0, seal=True)
    write_groups(tmp_path / name, 1)
    with RolloutTable.open(tmp_path / name) as table:
        assert (table.damage, [each.group_id for each in table.group_page()]) == ([], [1, 0])
        assert table.count(parse_query("text ilike '%what%'")).rollouts == 4
        assert [table.group(group_id).group_id for group_id in (0, 1)] == [0, 1]


def test_a_search_reads_only_what_is_new(
    open_store: OpenStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the viewer adds what it has shown so far, `seq <= N`; and tables that nothing asks for are dropped."""
    write_groups(tmp_path, 0, seal=True)
    store = open_store(tmp_path)
    read: list[int] = []
    original = Index.source

    def noted(self: Index, files: Sequence[Path]) -> Any:
        read.append(len(files))
        return original(self, files)

    monkeypatch.setattr(Index, "source", noted)
    query = parse_query("text ilike '%what is%'")
    newest = parse_query("text ilike '%what is%' and step = last_step()")
    with RolloutTable.open(tmp_path) as table:
        for number in range(1, 4):
            append_simple(store, number, step=number)
            table.refresh()
            shown = both(query, parse_query(f"seq<={number}"))
            assert table.count(shown).groups == table.count(query).groups == number + 1
        assert read == [1, 0, 0]
        append_simple(store, 4, step=4)
        assert table.count(newest).groups == 1
        table.refresh()
        assert [each.group_id for each in table.group_page(newest)] == [4], "the newest step is another one"
        assert table.count(query).groups == 5
        store.close()
        table.refresh()
        seal_all(tmp_path)  # what was searched as lines is not searched again
        assert not table.refresh()  # the same groups under another name
        read.clear()
        assert (table.count(query).groups, read) == (5, [])
        for number in range(40):
            table.count(parse_query(f"text ilike '%{number}%'"))
        ((tables,),) = table._index.fetch(Sql("SELECT count(*) FROM duckdb_tables() WHERE table_name LIKE 'match%'"))
        assert tables == len(table._index._searches) < 40


def test_a_table_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    write_groups(tmp_path / "rollouts", 0)
    before = sorted(path.name for path in (tmp_path / "rollouts").iterdir())
    with RolloutTable.open(tmp_path / "rollouts") as table:
        table.group(0)
        assert list(scratch.iterdir())
    table.close()
    assert list(scratch.iterdir()) == []
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == before


def test_a_table_reaches_no_other_files(tmp_path: Path) -> None:
    write_groups(tmp_path / "rollouts", 0)
    shutil.copytree(tmp_path / "rollouts", tmp_path / "other")
    seal_all(tmp_path / "other")
    (other,) = (tmp_path / "other").glob("*.parquet")
    with RolloutTable.open(tmp_path / "rollouts") as table, pytest.raises(RunError, match=r"[Pp]ermission"):
        table._index.read_blocks("seq", table._where(parse_query(""), False), [other])
