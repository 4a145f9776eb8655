"""metrics.jsonl."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from grpo_async.errors import RunError
from grpo_async.tracking import MetricsWriter, jsonl
from grpo_async.utils import files as line_files
from grpo_async.utils.files import read_objects


def _lines(path: Path) -> list[dict[str, Any]]:
    return list(read_objects(path, []))


def _steps(path: Path) -> list[int]:
    return [line["step"] for line in _lines(path)]


def test_a_resumed_run_drops_the_lines_of_steps_that_run_again_and_a_torn_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsWriter(path)
    for step in (1, 2, 3):
        log.write(step, {"reward": step / 10})
        assert _steps(path)[-1] == step  # a reader sees every whole line at once
    log.close()
    with path.open("a") as file:
        file.write('{"step": 4, "rew')
    assert _steps(path) == [1, 2, 3]
    with MetricsWriter(path, first_step=3) as resumed:
        resumed.write(3, {"reward": float("nan"), "lr": 1.0})
    assert _lines(path) == [
        {"step": 1, "reward": 0.1},
        {"step": 2, "reward": 0.2},
        {"step": 3, "reward": None, "lr": 1.0},
    ]


def test_lines_wait_for_room_on_a_full_disk_and_none_is_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsWriter(path)
    log.write(1, {"reward": 0.1})
    write, now = os.write, [0.0]

    def write_half(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(line_files.time, "monotonic", lambda: now[0])
    with monkeypatch.context() as full:
        full.setattr(jsonl.os, "write", write_half)
        log.write(2, {"reward": 0.2})
        now[0] = 59.0
        log.write(3, {"reward": 0.3})
        assert _steps(path) == [1]
        assert path.read_bytes().endswith(b"\n")
    log.write(4, {"reward": 0.4})
    assert _steps(path) == [1, 2, 3, 4]
    monkeypatch.setattr(jsonl.os, "write", write_half)
    log.write(5, {"reward": 0.5})
    now[0] = 120.0
    with pytest.raises(RunError, match=r"metrics\.jsonl: No space left on device"):
        log.write(6, {"reward": 0.6})
    with pytest.raises(ZeroDivisionError), log:  # an error that came before stays the cause
        raise ZeroDivisionError


def test_before_a_checkpoint_every_line_is_on_the_disk_or_it_is_an_error_and_none_is_written_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = tmp_path / "metrics.jsonl"
    for number, call in enumerate(("write", "fsync"), start=1):
        log = MetricsWriter(path, first_step=number)
        with monkeypatch.context() as full:
            full.setattr(jsonl.os, call, refuse)
            log.write(number, {"reward": 0.1})
            with pytest.raises(RunError, match="No space left on device"):
                log.sync()
        log.sync()
        log.close()
        assert _steps(path) == list(range(1, number + 1))
