"""What failing ranks leave, and what the launcher makes of it."""

from __future__ import annotations

import io
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from grpo_async.display.output import Output
from grpo_async.errors import DeadlineError
from grpo_async.launcher.lifecycle import report_end
from grpo_async.launcher.supervisor import RunOutcome
from grpo_async.processes.failures import RankExit, RankFailure, explain, write_failure, write_rank_exits
from grpo_async.run_directory import RunDir
from grpo_async.utils.safe_text import tail


def _fail(folder: Path, rank: int, error: Exception) -> None:
    try:
        raise error
    except type(error) as caught:
        write_failure(folder, RankFailure.of(rank, caught))


def _lines(folder: Path) -> list[str]:
    cause = explain(folder)
    assert cause is not None
    return cause.text.splitlines()


def _exit(rank: int, exit_code: int) -> RankExit:
    return RankExit(rank=rank, pid=100 + rank, time=time.time(), exit_code=exit_code)


def test_the_earliest_failure_is_the_cause_and_a_rank_that_the_agent_ended_is_not(tmp_path: Path) -> None:
    assert explain(tmp_path) is None
    _fail(tmp_path, 1, ZeroDivisionError("no samples"))
    _fail(tmp_path, 0, RuntimeError("connection closed by peer"))
    write_rank_exits(tmp_path, [_exit(1, 1), _exit(0, -signal.SIGTERM)])
    lines = _lines(tmp_path)
    assert lines[0] == "trainer rank 1 failed: ZeroDivisionError: no samples"
    assert any("in _fail" in line for line in lines)  # the traceback


def test_a_killed_rank_goes_before_the_error_that_it_caused_elsewhere(tmp_path: Path) -> None:
    _fail(tmp_path, 0, RuntimeError("connection closed by peer"))
    write_rank_exits(tmp_path, [_exit(0, 1), _exit(1, -signal.SIGKILL)])
    killed, other = _lines(tmp_path)
    assert killed.startswith("trainer rank 1 (pid 101) was killed by SIGKILL")
    assert other == "after that rank 0 reported: RuntimeError: connection closed by peer"


def test_a_rank_that_could_write_nothing_is_the_cause_by_what_it_told_the_launcher(tmp_path: Path) -> None:
    told = RankFailure.of(1, OSError(28, "No space left on device"))
    _fail(tmp_path, 0, RuntimeError("connection closed by peer"))
    cause = explain(tmp_path, [told])
    assert cause is not None
    assert cause.rank == 1
    assert cause.text.startswith("trainer rank 1 failed: OSError: [Errno 28] No space left on device")


def test_an_error_raised_on_purpose_is_shown_without_its_traceback(tmp_path: Path) -> None:
    _fail(tmp_path, 0, DeadlineError("samples of step 3", waited_s=600, setting="training.queue_timeout_s"))
    (line,) = _lines(tmp_path)
    assert line.startswith("trainer rank 0 failed: waited 600 s for samples of step 3")


def test_what_a_model_wrote_cannot_reach_the_terminal_through_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _fail(tmp_path, 0, RuntimeError("the tool said \x1b]0;x\x07here\x1b[2J\r gone"))
    lines = _lines(tmp_path)
    assert lines[0] == "trainer rank 0 failed: RuntimeError: the tool said here gone"
    assert "      raise error" in lines  # lines stay lines
    write_rank_exits(tmp_path, [_exit(1, -signal.SIGKILL)])
    assert _lines(tmp_path)[1] == "after that rank 0 reported: RuntimeError: the tool said here gone"
    outcome = RunOutcome(exit_code=1, error="the server said \x1b]0;x\x07no\x1b[2J\ntwice")
    assert report_end(outcome, RunDir(tmp_path), Output(console=Console(file=io.StringIO()))) == 1
    assert capsys.readouterr().err == "error: the server said no\ntwice\n"


def test_a_full_disk_does_not_mask_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_failure(tmp_path / "missing", RankFailure.of(0, ValueError("the cause")))
    assert "cannot write" in capsys.readouterr().err


def test_the_tail_of_a_log_is_short_and_cannot_move_the_cursor(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == []
    log.write_bytes(b"early\n" * 100_000 + b"10%\r20%\r\n\x1b[2J\x1b]0;title\x07\x1b[31mred\x1b[0m \xff\n\n")
    assert tail(log, 3) == ["early", "20%", "red \ufffd"]
