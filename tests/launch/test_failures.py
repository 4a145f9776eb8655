"""What failing ranks report, and what the launcher makes of it."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest
from rich.console import Console

from grpo_async.display.output import Output
from grpo_async.errors import ConfigError, DeadlineError
from grpo_async.launch.run import report_end
from grpo_async.launch.supervise import RunOutcome
from grpo_async.launch.watcher import explain
from grpo_async.processes.heartbeat import MAX_DATAGRAM, RankEnd, report, report_progress, stacks_file
from grpo_async.run_directory import RunDir
from grpo_async.utils.resilient_stream import ResilientStream
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


def test_an_error_raised_on_purpose_is_shown_without_its_traceback() -> None:
    error = DeadlineError("samples of step 3", waited_s=600, setting="training.queue_timeout_s")
    (line,) = _lines(_failure(0, error))
    assert line.startswith("trainer rank 0 failed: waited 600 s for samples of step 3")
    evaluation = RankEnd.of_error(0, error, name="evaluation rank")
    (line,) = _lines(evaluation)
    assert line.startswith("evaluation rank 0 failed: waited 600 s for samples of step 3")


def test_an_error_of_user_code_is_shown_with_its_traceback_whatever_it_was_raised_from() -> None:
    error = KeyError("answer")
    error.__cause__ = ConfigError("no column")
    lines = _lines(_failure(0, error))
    assert lines[0] == "trainer rank 0 failed: KeyError: 'answer'"
    assert any("in _failure" in line for line in lines)


def test_reports_reach_the_launcher_without_a_disk_and_one_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    reports = [_failure(0, RuntimeError("x" * 100_000)), _exit(1, -9)]
    report(tmp_path / "nobody", *reports)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as launcher:
        launcher.bind(str(tmp_path / "heartbeat"))
        report(tmp_path / "heartbeat", *reports)
        assert [json.loads(launcher.recv(MAX_DATAGRAM)) for _ in reports] == [
            {"kind": "end", "end": asdict(end)} for end in reports
        ]


def test_a_process_without_progress_writes_its_stacks(tmp_path: Path) -> None:
    report_progress(tmp_path / "heartbeat", 5.0, "nothing goes on")
    assert "in test_a_process_without_progress" in stacks_file(tmp_path / "heartbeat", os.getpid()).read_text()


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


def test_the_tail_of_a_log_is_short_and_cannot_move_the_cursor(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert tail(log) == []
    log.write_bytes(b"early\n" * 100_000 + b"10%\r20%\r\n\x1b[2J\x1b]0;title\x07\x1b[31mred\x1b[0m \xff\n\n")
    assert tail(log, 3) == ["early", "20%", "red \ufffd"]


@pytest.mark.parametrize(
    "act", ["sys.stdout.close()", "sys.stdout = open(os.devnull); sys.stdout.close()", "sys.stdout = sys.stderr = None"]
)
def test_user_code_that_closes_or_replaces_stdout_does_not_change_how_a_process_ends(act: str) -> None:
    script = f"""
import os, sys
from types import SimpleNamespace
from grpo_async.processes import entry

assignment = SimpleNamespace(rank=1, heartbeat_socket=None, control_socket=None, attempt_dir=None)
entry.Assignment = SimpleNamespace(from_environment=lambda: assignment)
entry.Heartbeat = lambda *_: None
entry.ControlClient = lambda _: SimpleNamespace(send=lambda *_: None, close=lambda: None)
entry.attempt_config = entry.load_config = lambda _: None

def work(*_):
    print("before")
    {act}

entry.run_process("trainer rank", work)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "before\n"), done.stderr


def test_a_reward_that_closes_stdout_leaves_it_to_the_others() -> None:
    file = io.StringIO()
    stream = ResilientStream(file, "standard output", lambda text: None)
    stream.close()
    stream.write("still here")
    assert file.getvalue() == "still here"
