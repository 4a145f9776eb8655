"""The report at the end of a run: written however the run ended, and never what ends it."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from grpo_async.launch import final_report
from grpo_async.launch.final_report import write_final_report
from grpo_async.launch.output import Output
from grpo_async.launch.summary import print_summary
from grpo_async.rundir import RunDir
from tests.launch.support import make_config
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
