"""What failing ranks report, and what the launcher makes of it."""

from __future__ import annotations

import io
import signal
import time
from pathlib import Path

import pytest
from rich.console import Console

from grpo_async.display.output import Output
from grpo_async.launch.start import report_end
from grpo_async.launch.supervise import RunOutcome, explain
from grpo_async.processes.heartbeat import RankEnd
from grpo_async.run_directory import RunDir
from grpo_async.utils.safe_text import tail


def _failure(rank: int, error: Exception) -> RankEnd:
    try:
        raise error
    except type(error) as caught:
        return RankEnd.of_error(rank, caught)


def _exit(rank: int, status: int) -> RankEnd:
    return RankEnd.of_status(rank, status, 100 + rank, time.time())


def _lines(*reports: RankEnd) -> list[str]:
    cause = explain(reports)
    assert cause is not None
    return cause.text.splitlines()


def test_the_earliest_failure_is_the_cause_and_a_rank_that_the_agent_ended_is_not() -> None:
    assert explain([]) is None
    first = _failure(1, ZeroDivisionError("no samples"))
    then = _failure(0, RuntimeError("connection closed by peer"))
    lines = _lines(then, first, _exit(1, 1), _exit(0, -signal.SIGTERM))
    assert lines[0] == "trainer rank 1 failed: ZeroDivisionError: no samples"
    assert any("in _failure" in line for line in lines)  # the traceback


def test_a_killed_rank_goes_before_the_error_that_it_caused_elsewhere() -> None:
    lines = _lines(_failure(0, RuntimeError("connection closed by peer")), _exit(0, 1), _exit(1, -signal.SIGKILL))
    assert lines[0].startswith("trainer rank 1 (pid 101) was killed by SIGKILL")
    assert lines[1:] == ["after that rank 0 reported: RuntimeError: connection closed by peer"]


def test_what_a_model_wrote_cannot_reach_the_terminal_through_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failure = _failure(0, RuntimeError("the tool said \x1b]0;x\x07here\x1b[2J\r gone"))
    lines = _lines(failure)
    assert lines[0] == "trainer rank 0 failed: RuntimeError: the tool said here gone"
    assert "      raise error" in lines  # lines stay lines
    after = _lines(failure, _exit(1, -signal.SIGKILL))[1]
    assert after == "after that rank 0 reported: RuntimeError: the tool said here gone"
    outcome = RunOutcome(exit_code=1, error="the server said \x1b]0;x\x07no\x1b[2J\ntwice")
    report_end(outcome, RunDir(tmp_path), Output(console=Console(file=io.StringIO())))
    assert capsys.readouterr().err == "error: the server said no\ntwice\n"
    log = tmp_path / "log"
    assert tail(log) == []
    log.write_bytes(b"early\n" * 100_000 + b"10%\r20%\r\n\x1b[2J\x1b]0;title\x07\x1b[31mred\x1b[0m \xff\n\n")
    assert tail(log, 3) == ["early", "20%", "red \ufffd"]
