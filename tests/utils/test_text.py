"""Numbers, durations and lists as every command writes them; what is read of JSON that another process writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_async.utils.files import parse_object, read_object, read_objects


@pytest.mark.parametrize(
    "content",
    [b"", b"[1]", b'"x"', b"\xff", b"[" * 100_000, b'{"step": 1'],
    ids=["empty", "list", "text", "no UTF-8", "nested", "torn"],
)
def test_whatever_a_file_holds_reading_it_raises_nothing(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    assert read_object(path, problems := []) == {}
    assert list(read_objects(path, problems)) == problems == []
    path.write_bytes(content)
    assert parse_object(content) is None
    assert read_object(path, []) == {}
    path.write_bytes(b'{"step": 1}\n' + content + b'\n{"step": 2}\n{"step": 3')
    assert [line["step"] for line in read_objects(path, problems)] == [1, 2]
    assert problems == ["file: 1 line left out: not JSON objects"]
