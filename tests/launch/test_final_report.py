"""The report at the end of a run is not waited for too long. That it is written: tests/e2e."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from grpo_async.display.output import Output
from grpo_async.launch import start as run
from grpo_async.launch.start import end_with_report
from grpo_async.launch.supervise import RunOutcome
from tests.launch.support import make_config
from tests.viewer.support import steps, write_run


def test_a_report_that_hangs_is_given_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(hanging))
    monkeypatch.setattr(run, "_REPORT_TIMEOUT_AFTER_STOP_S", 0.5)
    config, run_dir = make_config(tmp_path, record={"report": True}), write_run(tmp_path, metrics=steps(6))
    end_with_report(RunOutcome(exit_code=143), config, run_dir, Output(console=Console(file=io.StringIO())))
    assert "timed out after 0.5 seconds" in capsys.readouterr().err
