"""Exports hold what the store holds, in its order, and the examples of docs/rollout-store.md can read it."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import duckdb
import orjson
import pytest

from grpo_async.errors import RunError
from grpo_async.records import GroupStatus
from grpo_async.store.export import Format, export_rollouts
from grpo_async.store.query import parse_query
from grpo_async.store.schema import COLUMN_NAMES
from grpo_async.store.seal import seal_block
from tests.store.builders import (
    append,
    append_simple,
    build_group,
    build_rollout,
    build_sample,
    build_stats,
    build_tool_rollout,
)
from tests.support.stored import LineStore

EVERYTHING = parse_query("")
PAGE = (Path(__file__).parents[2] / "docs" / "rollout-store.md").read_text(encoding="utf-8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two sealed blocks and one of lines; group 9 has tools, 10 no rollout; 9 and 11 have the trainer's statistics."""
    found = tmp_path / "runs" / "NAME" / "rollouts"
    for first in (0, 4):
        with LineStore(found) as store:
            for group_id in range(first, first + 4):
                append_simple(store, group_id, rewards=(0.0, 0.25 * group_id), step=group_id)
        for lines in found.glob("*.jsonl"):
            seal_block(lines)
    with LineStore(found) as store:
        tools = build_group(9, [build_tool_rollout("9-0")], answer={"a": [1, None]})  # mask 1 1 0 0 1
        append(store, tools, [], GroupStatus.FAILED, None, stats={"9-0": build_stats(3)})
        append(store, build_group(10, []), [], GroupStatus.CANCELLED, None)
        rollout = build_rollout("11-0", text='say "hi"\n\x1b[2J漢', logprobs=[-0.1, -1e-8, -2.5])
        sample = build_sample(11, rollout, 0.5)
        append(store, build_group(11, [rollout]), [sample], GroupStatus.TRAINED, 9, stats={"11-0": build_stats(3)})
    return found


def _read(path: Path, format_: Format) -> list[dict[str, Any]]:
    if format_ == "jsonl":
        return [orjson.loads(line) for line in path.read_bytes().splitlines()]
    with duckdb.connect() as connection:
        found = connection.execute("SELECT * FROM read_parquet(?)", [str(path)])
        names = [column[0] for column in found.description or ()]
        return [dict(zip(names, row, strict=True)) for row in found.fetchall()]


@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
def test_an_export_has_every_row_and_column_in_the_order_of_writing(
    folder: Path, tmp_path: Path, format_: Format
) -> None:
    out = tmp_path / f"it's [out].{format_}"
    done = export_rollouts(folder, out, format_, EVERYTHING)
    rows = _read(out, format_)
    assert (done.rollouts, done.groups, done.notes) == (18, 11, [])
    assert len(rows) == 19  # the group without rollouts has a row
    assert list(rows[0]) == [*COLUMN_NAMES, "superseded"]
    assert [(row["seq"], row["rollout_index"]) for row in rows[:4]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [row["seq"] for row in rows] == sorted(row["seq"] for row in rows)
    assert [row["rollout_id"] for row in rows[-3:]] == ["9-0", None, "11-0"]
    last = rows[-1]
    assert last["completion_text"] == 'say "hi"\n\x1b[2J漢'
    assert last["logprobs"] == pytest.approx([-0.1, -1e-8, -2.5])
    assert last["weights"] == [1.0, 2.0, 3.0]
    assert (last["trainer_logprobs"], last["proximal_logprobs"]) == ([-1.0, -1.5, -2.0], [-1.25, -1.75, -2.25])
    assert last["token_flags"] == [0, 1, 2]
    assert last["rewards"] == {"exact": 0.5, "format": None}
    assert (last["step"], last["superseded"], last["truncated"]) == (9, False, False)
    tools = rows[-3]
    columns = tools["columns"] if format_ == "jsonl" else orjson.loads(tools["columns"])
    assert columns == {"answer": {"a": [1, None]}}
    assert tools["tool_names"] == ["add"]
    assert (tools["weights"], tools["token_flags"]) == ([1.0, 2.0, None, None, 3.0], [0, 1, None, None, 2])
    assert rows[0]["weights"] is None
    if format_ == "jsonl":  # the digits that single precision needs
        assert b'"logprobs":[-0.1,' in out.read_bytes()
    done = export_rollouts(folder, out, format_, parse_query("reward>=1 and text ilike '%what is%'"))
    assert [row["rollout_id"] for row in _read(out, format_)] == ["4-1", "5-1", "6-1", "7-1"]
    assert (done.rollouts, done.groups) == (4, 4)


def test_superseded_rows_are_exported_when_asked_for(tmp_path: Path) -> None:
    folder, out = tmp_path / "rollouts", tmp_path / "out"
    with LineStore(folder) as store:
        append_simple(store, 0)
        position = store.position()
        append_simple(store, 1)
    with LineStore(folder) as store:
        store.supersede_from(position, step=0)
        append_simple(store, 1)
    export_rollouts(folder, out, "parquet", EVERYTHING)
    assert [row["seq"] for row in _read(out, "parquet")] == [0, 0, 2, 2]
    done = export_rollouts(folder, out, "parquet", EVERYTHING, with_superseded=True)
    assert [row["superseded"] for row in _read(out, "parquet")] == [False, False, True, True, False, False]
    assert "superseded" in done.notes[0]


@pytest.mark.parametrize("format_", ["jsonl", "parquet"])
def test_damage_inside_of_a_block_is_an_error_that_names_it_and_leaves_the_old_file(
    folder: Path, tmp_path: Path, format_: Format
) -> None:
    """Found only when its pages are read."""
    out = tmp_path / "made" / "out"
    out.parent.mkdir()
    out.write_text("as it was")
    path = min(folder.glob("*.parquet"))
    path.write_bytes(path.read_bytes().replace(b"\x28\xb5\x2f\xfd", b"\xff" * 4))  # begins each compressed page
    with pytest.raises(RunError, match=path.name):
        export_rollouts(folder, out, format_, EVERYTHING)
    assert list(out.parent.iterdir()) == [out]
    assert out.read_text() == "as it was"


def test_the_examples_of_the_page_run(folder: Path, tmp_path: Path) -> None:
    export_rollouts(folder, tmp_path / "rollouts.parquet", "parquet", EVERYTHING)
    export_rollouts(folder, tmp_path / "rollouts.jsonl", "jsonl", EVERYTHING)
    printed = ""
    for example in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        library = example.split("\n", 1)[0].removeprefix("import ")
        if library in ("pandas", "polars") and importlib.util.find_spec(library) is None:
            continue
        command = [sys.executable, "-c", example]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        printed += done.stdout
    assert all(words in printed for words in ("sometimes", "add", "9-0"))
