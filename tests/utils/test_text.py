"""Numbers, durations and lists as every command writes them; what is read of JSON that another process writes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from grpo_async.utils.files import numbers, parse_object, read_object, read_objects
from grpo_async.utils.text import finite


def test_only_what_is_a_finite_number_counts_as_one() -> None:
    given = {"a": 1, "b": 0.5, "c": True, "d": "1", "e": None, "f": math.nan, "g": math.inf, "h": 10**400}
    assert numbers(given) == {"a": 1.0, "b": 0.5}
    assert numbers([1]) == {}
    assert finite(10**400) is None


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
