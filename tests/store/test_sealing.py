"""Blocks become Parquet files, while the run goes on and at its end; nothing is lost or doubled on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import pytest

from grpo_async.records import GroupStatus, ScoredGroup
from grpo_async.store import RolloutStore
from grpo_async.store.files import find_blocks, read_metadata
from grpo_async.store.schema import COLUMN_NAMES, COLUMNS, SCHEMA, select_from_lines
from grpo_async.store.seal import seal_block
from tests.store.builders import (
    append,
    append_simple,
    build_branched_rollout,
    build_failed_rollout,
    build_group,
    build_rollout,
    build_sample,
    build_stats,
    build_tool_rollout,
    seal_all,
    small_blocks,
)
from tests.support.stored import LineStore, read_groups
from tests.support.waiting import eventually


def _fill(store: RolloutStore, rows: range) -> None:
    """Groups of every kind."""
    for group_id in rows:
        tool, plain = build_tool_rollout(f"{group_id}-0"), build_rollout(f"{group_id}-1", text='a\x00"\n\u2028🎉')
        tool_sample, sample = build_sample(group_id, tool, 0.1, 1.5), build_sample(group_id, plain, float("nan"))
        group = build_group(group_id, [tool, plain, build_failed_rollout(f"{group_id}-2", "'; DROP TABLE x; --")])
        match group_id % 4:
            case 0:
                stats = {tool.rollout_id: build_stats(3), plain.rollout_id: build_stats(3, first=0.1)}
                append(store, group, [tool_sample, sample], GroupStatus.TRAINED, group_id, stats=stats)
            case 1:
                scored = ScoredGroup(
                    group=group,
                    samples=[],
                    rewards=[1.0, None],
                    reward_parts=[{"exact": 1.0}, {}],
                    extra_columns={"note": [{"a": [1, None]}, "x"]},
                )
                append(store, group, [], GroupStatus.FILTERED, None, scored=scored)
            case 2:
                append(store, build_group(group_id, [], answer=2**70, odd={1: "ü"}), [], GroupStatus.CANCELLED, None)
            case _:
                append(store, build_group(group_id, [plain]), [sample], GroupStatus.STALE, 3)


def _columns(connection: Any, sql: str) -> dict[str, str]:
    return {name: type_ for name, type_, *_ in connection.execute(f"DESCRIBE {sql}").fetchall()}


@pytest.fixture
def connection() -> Iterator[Any]:
    with duckdb.connect() as connection:
        yield connection


def test_a_sealed_block_has_the_columns_of_the_schema_and_every_value_of_its_lines(
    tmp_path: Path, connection: Any
) -> None:
    with LineStore(tmp_path) as store:
        _fill(store, range(12))
    (block,) = find_blocks(tmp_path)
    rows = read_groups(tmp_path)
    wanted = {column.name: column.type for column in COLUMNS}
    select = select_from_lines(block.path)
    assert _columns(connection, select) == wanted
    from_lines = connection.execute(select).fetchall()
    assert len(from_lines) == 3 * 3 + 3 * 3 + 3 + 3  # a group without rollouts has a row

    sealed = seal_block(block.path)
    assert sealed.name == "block-000000000000-000000000011.parquet"
    assert not block.path.exists()
    read = f"SELECT * FROM read_parquet('{sealed}')"
    assert _columns(connection, read) == wanted
    assert connection.execute(read).fetchall() == from_lines
    assert read_groups(tmp_path) == rows
    meta = "SELECT key, value FROM parquet_kv_metadata(?)"
    assert connection.execute(meta, [str(sealed)]).fetchall() == [(b"grpo_async_schema", str(SCHEMA).encode())]


def test_the_derived_columns_are_what_they_say(tmp_path: Path, connection: Any) -> None:
    """Ids [5, 6, 90, 91, 7], mask [1, 1, 0, 0, 1], sampler [-0.5, -1.5, -3.5], trainer [-1, -1.5, -2], versions 2, 3, 3."""
    tool, failed = build_tool_rollout("7-0"), build_failed_rollout("7-1")
    other = replace(build_branched_rollout("7-2"), turns=build_rollout("7-2", version=4).turns)  # branches: version 0
    samples = [build_sample(7, tool, 0.5, advantage=1.25), build_sample(7, other, 1.5)]
    group, stats = build_group(7, [tool, failed, other]), {"7-0": build_stats(3)}
    with LineStore(tmp_path) as store:
        append(store, group, samples, GroupStatus.TRAINED, 6, stats=stats)
    (block,) = find_blocks(tmp_path)
    rows = connection.execute(select_from_lines(block.path)).fetchall()
    first, second, third = (dict(zip(COLUMN_NAMES, row, strict=True)) for row in rows)
    expected = {
        "group_status": "trained", "group_size": 3, "rollout_index": 0, "prompt_text": "be brief\nwhat is 1 + 1?",
        "group_reward_mean": 1.0, "group_reward_std": pytest.approx(0.5**0.5), "rewards": {"exact": 0.5, "format": None},
        "num_prompt_tokens": 2, "num_tokens": 3, "num_completion_tokens": 5, "num_turns": 2, "num_tool_calls": 1,
        "num_failed_tool_calls": 1, "tool_names": ["add"], "completion_text": "add(1, 2)\n3\nthree",
        "version_min": 2, "version_max": 3, "staleness": 3,  # 6 - 1 - 2
        "logprob_mean": pytest.approx(-5.5 / 3), "logprob_min": -3.5, "entropy_mean": 1.5,
        "ratio_mean": 2.0, "ratio_min": 1.0, "ratio_max": 3.0,
        "clipped_fraction": pytest.approx(2 / 3), "masked_fraction": 0.0,  # marks 0, 1, 2
        "mismatch_mean": pytest.approx(2.0 / 3),  # 0.5, 0, 1.5
        "started_at": None, "waiting_duration_s": None, "tool_duration_s": 0.125, "generation_duration_s": 1.0,
    }  # fmt: skip
    assert {name: first[name] for name in expected} == expected
    nothing = ("version_min", "staleness", "logprob_mean", "entropy_mean", "clipped_fraction", "mismatch_mean")
    assert {name: second[name] for name in nothing} == dict.fromkeys(nothing)
    assert (third["version_min"], third["version_max"], third["staleness"]) == (0, 4, 5)


def test_a_full_block_is_sealed_while_the_run_goes_on_and_the_last_one_at_its_end(tmp_path: Path) -> None:
    folder = tmp_path / "it's [a*] run"  # neither SQL nor a pattern
    with RolloutStore(folder, settings=small_blocks(block_mb=0.02)) as store:
        _fill(store, range(30))
        store.flush()
        before = read_groups(folder)
        assert eventually(lambda: any(block.is_sealed for block in find_blocks(folder)), 60.0), "a sealed block"
        assert read_groups(folder) == before
    assert all(block.is_sealed for block in find_blocks(folder))
    assert read_groups(folder) == before
    assert not list(folder.glob("*.jsonl"))
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert not list(folder.glob("*.sealing"))


def test_lines_longer_than_the_buffer_of_the_database_are_sealed(tmp_path: Path) -> None:
    with LineStore(tmp_path) as store:
        append_simple(store, 0, answer="x" * 20_000_000)  # in each of its two rollouts: beyond twice the buffer
    seal_all(tmp_path)
    assert [len(row.rollouts[0].messages[0].content) for row in read_groups(tmp_path)] == [20_000_000]


# -- interrupted


def test_what_an_earlier_writer_left_is_sealed_by_the_next(tmp_path: Path) -> None:
    with LineStore(tmp_path) as store:
        _fill(store, range(6))
    before = read_groups(tmp_path)
    (tmp_path / "block-000000000000.jsonl.sealing").write_bytes(b"half a file")
    lines = (tmp_path / "block-000000000000.jsonl").read_bytes()
    with RolloutStore(tmp_path) as again:
        _fill(again, range(6, 8))
    assert [(block.first_seq, block.is_sealed) for block in find_blocks(tmp_path)] == [(0, True), (6, True)]
    assert read_groups(tmp_path)[:6] == before
    assert not list(tmp_path.glob("*.sealing"))
    (tmp_path / "block-000000000000.jsonl").write_bytes(lines)  # a kill between the renaming and the removal
    assert [block.is_sealed for block in find_blocks(tmp_path)] == [True, True]
    assert read_groups(tmp_path)[:6] == before
    with LineStore(tmp_path) as again:
        append_simple(again, 8)
    assert not (tmp_path / "block-000000000000.jsonl").exists()
    assert read_groups(tmp_path)[:6] == before


# -- room


def test_the_oldest_blocks_make_room_and_readers_are_told(tmp_path: Path) -> None:
    with RolloutStore(tmp_path, settings=small_blocks(max_gb=60_000 / 1e9)) as store:
        for first in range(0, 24, 4):
            _fill(store, range(first, first + 4))
            store.flush()
    rows = read_groups(tmp_path)
    assert rows[-1].seq == 23
    assert rows[0].seq > 0
    assert [row.seq for row in rows] == list(range(rows[0].seq, 24))
    assert sum(path.stat().st_size for path in tmp_path.glob("block-*")) <= 60_000
    (note,) = read_metadata(tmp_path).notes(tmp_path)
    assert note == f"every group before seq {rows[0].seq} was deleted to keep to record.rollouts.max_gb"
    with RolloutStore(tmp_path) as again:
        assert again.position() == 24
    with RolloutStore(tmp_path, settings=small_blocks(max_gb=1e-9)) as tiny:
        append_simple(tiny, 24)
    assert [row.group_id for row in read_groups(tmp_path)] == [24], "the newest block stays whatever the limit"
