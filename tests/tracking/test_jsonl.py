"""metrics.jsonl."""

from __future__ import annotations

from pathlib import Path

from grpo_async.tracking import MetricsLog, read_metrics


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
