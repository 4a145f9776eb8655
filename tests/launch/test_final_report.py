"""The report at the end of a run: written however the run ended, and never what ends it."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from pathlib import Path
from typing import TextIO

import pytest
from rich.console import Console

from grpo_async.display.output import Output
from grpo_async.launch import start as run
from grpo_async.launch.start import end_with_report
from grpo_async.launch.supervise import RunOutcome
from grpo_async.run_directory import RunDir
from tests.launch.support import make_config
from tests.support.waiting import eventually, is_alive
from tests.viewer.support import steps, write_run

FINISHED = RunOutcome(exit_code=0, summary={"status": "finished"})


def _end(
    folder: Path, run_dir: RunDir, outcome: RunOutcome = FINISHED, *, report: bool = True, stream: TextIO | None = None
) -> None:
    console = Console(file=stream or io.StringIO(), width=200)
    end_with_report(outcome, make_config(folder, record={"report": report}), run_dir, Output(console=console))


def test_the_report_of_a_run_is_written_by_a_child(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, metrics=steps(6), state="failed", error="the trainer ended")
    _end(tmp_path, run_dir, report=False)
    assert not run_dir.report.exists()
    _end(tmp_path, run_dir, RunOutcome(exit_code=1, error="the trainer ended"))
    assert "the trainer ended" in run_dir.report.read_text(encoding="utf-8")


def test_a_report_that_fails_is_a_warning_with_the_command_to_try_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path, metrics=steps(6))
    run_dir.report.mkdir()  # nothing can be put in its place
    _end(tmp_path, run_dir)
    said = capsys.readouterr().err
    assert said.startswith("warning: report.html was not written: ")
    assert f"try again: grpo-async report {run_dir.root}" in said


def _hanging_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replaces the report's process; the file that is returned holds its pid as soon as it runs."""
    pid = folder / "pid"
    hanging = folder / "python"
    hanging.write_text(f"#!/bin/sh\necho $$ > {pid}.tmp\nmv {pid}.tmp {pid}\nexec sleep 60\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hanging))
    return pid


def test_a_signal_during_the_report_ends_it_after_the_summary_and_leaves_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_run(tmp_path, metrics=steps(6))
    pid = _hanging_python(tmp_path, monkeypatch)
    printed: list[str] = []
    stream = io.StringIO()

    def send() -> None:
        eventually(pid.exists, 20.0)
        printed.append(stream.getvalue())
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    before = signal.getsignal(signal.SIGTERM)
    _end(tmp_path, run_dir, stream=stream)
    sender.join(timeout=20.0)
    assert str(run_dir.report) in printed[0].split("next:")[1]  # the summary was there before the report was
    assert "report.html was not written: a signal ended it; try again" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before
    assert not is_alive(int(pid.read_text()))


@pytest.mark.parametrize(
    ("outcome", "limit"),
    [(FINISHED, "_REPORT_TIMEOUT_S"), (RunOutcome(exit_code=143), "_REPORT_TIMEOUT_AFTER_STOP_S")],
)
def test_a_report_that_hangs_is_given_up_and_sooner_after_a_stop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, outcome: RunOutcome, limit: str
) -> None:
    _hanging_python(tmp_path, monkeypatch)
    monkeypatch.setattr(run, limit, 0.5)
    _end(tmp_path, write_run(tmp_path, metrics=steps(6)), outcome)
    assert "timed out after 0.5 seconds" in capsys.readouterr().err
