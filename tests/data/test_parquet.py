"""Parquet through the real pyarrow."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from grpo_async.config.data_sections import ParquetSource
from grpo_async.data import readers
from grpo_async.data.sources import load_rows
from grpo_async.errors import ConfigError


def _write(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def _source(path: Path, **settings: Any) -> ParquetSource:
    return ParquetSource(type="parquet", path=path, **settings)


def test_nested_columns_messages_and_dates_are_read(tmp_path: Path) -> None:
    day = datetime.date(2024, 2, 29)
    messages = [{"role": "user", "content": "2+2", "name": None}]
    rows = [{"prompt": messages, "reward_model": {"ground_truth": "4"}, "day": day}]
    source = _source(_write(tmp_path / "a.parquet", rows), columns={"reward_model.ground_truth": "answer"})
    (row,) = load_rows(source)
    assert row == {
        "prompt": [{"role": "user", "content": "2+2"}],
        "reward_model": {"ground_truth": "4"},
        "day": day,
        "answer": "4",
    }


def test_a_file_is_read_in_batches_and_a_folder_in_the_order_of_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readers, "_BATCH_ROWS", 2)
    _write(tmp_path / "b.parquet", [{"prompt": "b0"}])
    _write(tmp_path / "a.parquet", [{"prompt": f"a{number}"} for number in range(5)])
    rows = load_rows(_source(tmp_path))
    assert [row["prompt"] for row in rows] == ["a0", "a1", "a2", "a3", "a4", "b0"]
    assert rows.places[3:] == [
        f"{tmp_path / 'a.parquet'}, row 3",
        f"{tmp_path / 'a.parquet'}, row 4",
        f"{tmp_path / 'b.parquet'}, row 0",
    ]


def test_a_bad_row_is_named_with_file_row_and_column(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.parquet", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": None}])
    with pytest.raises(ConfigError, match=r"a\.parquet, row 2: `prompt` must be text or a list .* got null"):
        load_rows(_source(path))


def test_files_that_are_not_there_or_no_parquet_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file or folder"):
        load_rows(_source(tmp_path / "no.parquet"))
    with pytest.raises(ConfigError, match=r"this folder has no \*\.parquet file"):
        load_rows(_source(tmp_path))
    (tmp_path / "text.parquet").write_text('{"prompt": "a"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="cannot be read as Parquet"):
        load_rows(_source(tmp_path / "text.parquet"))


def test_a_truncated_file_is_refused(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.parquet", [{"prompt": "a" * 1000}])
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ConfigError, match="check that it is whole"):
        load_rows(_source(path))


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pyarrow.table([["a"], ["b"]], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(ConfigError, match="`prompt` names more than one column"):
        load_rows(_source(tmp_path / "a.parquet"))
