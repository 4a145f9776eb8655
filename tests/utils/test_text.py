"""Numbers, durations and lists as every command writes them; what is read of JSON that another process writes."""

from __future__ import annotations

import errno
import math
from pathlib import Path

import pytest

from grpo_async.utils.files import numbers, parse_object, read_object, read_objects
from grpo_async.utils.text import duration, finite, format_number, percent


def test_numbers_and_durations_are_short() -> None:
    values = [0.0, 0.123456, 12.3456, 1234.5, 123456.0, 1.5e6, 2e13, 1e-05, 999.7, 999_999.7]
    assert " ".join(map(format_number, values)) == "0 0.123 12.3 1,234 123,456 1.5M 20T 1e-05 1,000 1M"
    assert " ".join(map(percent, (0.875, 0.004, 0.999, 1.0))) == "88% 0.4% 99.9% 100%"
    assert " ".join(map(percent, (0.0, 0.0004, 0.99996))) == "0% <0.1% >99.9%"
    shown = {0.0: "0 s", 0.0042: "4.2 ms", 2.5: "2.5 s", 59.94: "59.9 s", 59.96: "1:00", 75: "1:15", 3725: "1:02:05"}
    assert {seconds: duration(seconds) for seconds in shown} == shown


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


def test_a_network_file_system_that_fails_is_a_problem_of_the_file_and_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Path) -> None:
        raise OSError(errno.ESTALE, "stale")

    monkeypatch.setattr(Path, "is_file", fail)
    problems: list[str] = []
    assert read_object(tmp_path / "a", problems) == {}
    assert list(read_objects(tmp_path / "b", problems)) == []
    assert [problem.partition(":")[0] for problem in problems] == ["a cannot be read", "b cannot be read"]
