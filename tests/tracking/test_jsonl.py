"""metrics.jsonl."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from grpo_async.errors import RunError
from grpo_async.tracking import MetricsLog, jsonl, read_metrics


def test_a_resumed_run_drops_the_lines_of_steps_that_run_again(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    for step in (1, 2, 3):
        log.write(step, {"reward": step / 10})
    log.close()
    resumed = MetricsLog(path, first_step=3)
    resumed.write(3, {"reward": 0.9})
    resumed.close()
    assert [(line["step"], line["reward"]) for line in read_metrics(path)] == [(1, 0.1), (2, 0.2), (3, 0.9)]


def test_a_torn_last_line_is_left_out_and_a_reader_sees_every_whole_line_at_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(1, {"reward": 0.5})
    assert len(list(read_metrics(path))) == 1  # before close
    log.close()
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    assert [line["step"] for line in read_metrics(path)] == [1]
    assert [line["step"] for line in read_metrics(path)] == [1]


def test_values_that_are_not_finite_are_null(tmp_path: Path) -> None:
    log = MetricsLog(tmp_path / "m")
    log.write(1, {"policy_loss": float("nan"), "grad_norm": float("inf"), "lr": 1.0})
    log.close()
    (line,) = read_metrics(tmp_path / "m")
    assert line == {"step": 1, "policy_loss": None, "grad_norm": None, "lr": 1.0}


def test_lines_wait_for_room_on_a_full_disk_and_none_is_half_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "metrics.jsonl"
    log = MetricsLog(path)
    log.write(1, {"reward": 0.1})
    write, now = os.write, [0.0]

    def write_half(descriptor: int, data: bytes) -> int:
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(jsonl.time, "monotonic", lambda: now[0])
    with monkeypatch.context() as full:
        full.setattr(jsonl.os, "write", write_half)
        log.write(2, {"reward": 0.2})
        now[0] = 59.0
        log.write(3, {"reward": 0.3})
        assert [line["step"] for line in read_metrics(path)] == [1]
        assert path.read_bytes().endswith(b"\n")
    log.write(4, {"reward": 0.4})
    assert [line["step"] for line in read_metrics(path)] == [1, 2, 3, 4]
    monkeypatch.setattr(jsonl.os, "write", write_half)
    log.write(5, {"reward": 0.5})
    now[0] = 120.0
    with pytest.raises(RunError, match=r"metrics\.jsonl: No space left on device"):
        log.write(6, {"reward": 0.6})
    with pytest.raises(ZeroDivisionError), log:  # an error that came before stays the cause
        raise ZeroDivisionError


def test_a_line_that_cannot_be_read_costs_itself_alone(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    content = b'{"step": 1, "reward": 0.5}\n{"step": 2, "re\xffard": 0.5}\n{"step": 3}\n'
    path.write_bytes(content)
    log = MetricsLog(path, first_step=4)
    log.close()
    assert [line["step"] for line in read_metrics(path)] == [1, 3]
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == content
