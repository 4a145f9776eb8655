"""The report at the end of a run: written however the run ended, and never what ends it."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console

from grpo_async.display.output import Output
from grpo_async.display.summary import print_summary
from grpo_async.launcher import final_report
from grpo_async.launcher.final_report import end_with_report, write_final_report
from grpo_async.launcher.supervisor import Outcome
from grpo_async.rundir import RunDir
from tests.launcher.support import make_config
from tests.viewer.report.support import steps, write_run


def _write(folder: Path, run_dir: RunDir, **record: object) -> Path | None:
    return write_final_report(
        make_config(folder, record={"report": True, **record}), run_dir, Output(console=Console(file=io.StringIO()))
    )


def test_the_report_of_a_run_is_written_by_a_child(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, metrics=steps(6), state="failed", error="the trainer ended")
    assert _write(tmp_path, run_dir) == run_dir.report
    assert "the trainer ended" in run_dir.report.read_text(encoding="utf-8")


def test_no_report_is_written_where_it_is_switched_off(tmp_path: Path) -> None:
    run_dir = write_run(tmp_path, metrics=steps(6))
    assert _write(tmp_path, run_dir, report=False) is None
    assert not run_dir.report.exists()


def test_a_report_that_fails_is_a_warning_with_the_command_to_try_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = write_run(tmp_path, metrics=steps(6))
    run_dir.report.mkdir()  # nothing can be put in its place
    assert _write(tmp_path, run_dir) is None
    said = capsys.readouterr().err
    assert said.startswith("warning: there is no report.html: ")
    assert f"try again: grpo-async report {run_dir.root}" in said


def test_a_report_that_hangs_is_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = write_run(tmp_path, metrics=steps(6))
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hanging))
    monkeypatch.setattr(final_report, "_TIMEOUT_S", 0.5)
    assert _write(tmp_path, run_dir) is None
    assert "it was not done after 0.5 s" in capsys.readouterr().err


def test_the_summary_names_the_report_first(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    print_summary(console, {"status": "finished"}, tmp_path, report=tmp_path / "report.html")
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    following = lines[lines.index("next:") + 1 :]
    assert following[0].startswith(f"  {tmp_path / 'report.html'}")
    assert "inspect-rollouts" in following[1]


def _hanging_python(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands in for the report's process; the file that is returned holds its pid as soon as it runs."""
    pid = folder / "pid"
    hanging = folder / "python"
    hanging.write_text(f"#!/bin/sh\necho $$ > {pid}.tmp\nmv {pid}.tmp {pid}\nexec sleep 60\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hanging))
    return pid


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_during_the_report_ends_it_after_the_summary_and_leaves_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    run_dir = write_run(tmp_path, metrics=steps(6))
    pid = _hanging_python(tmp_path, monkeypatch)
    printed: list[str] = []
    stream = io.StringIO()

    def send() -> None:
        until = time.monotonic() + 20.0
        while not pid.exists() and time.monotonic() < until:
            threading.Event().wait(0.02)
        printed.append(stream.getvalue())
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    before = signal.getsignal(number)
    code = end_with_report(
        Outcome(exit_code=0, summary={"status": "finished"}),
        make_config(tmp_path, record={"report": True}),
        run_dir,
        Output(console=Console(file=stream, width=200)),
    )
    sender.join(timeout=20.0)
    assert code == 0
    assert str(run_dir.report) in printed[0].split("next:")[1]  # the summary was there before the report was
    assert f"there is no report.html: {number.name} ended it; try again" in capsys.readouterr().err
    assert signal.getsignal(number) == before
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid.read_text()), 0)


def test_after_a_stop_the_report_has_little_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert final_report._TIMEOUT_AFTER_STOP_S <= 15.0
    run_dir = write_run(tmp_path, metrics=steps(6))
    _hanging_python(tmp_path, monkeypatch)
    monkeypatch.setattr(final_report, "_TIMEOUT_AFTER_STOP_S", 0.5)
    config = make_config(tmp_path, record={"report": True})
    stopped = Outcome(exit_code=143, summary={"status": "stopped"})
    assert end_with_report(stopped, config, run_dir, Output(console=Console(file=io.StringIO()))) == 143
    assert "it was not done after 0.5 s" in capsys.readouterr().err
