"""A failed step names the cause and the cure."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from scripts.install.plan import InstallError
from scripts.install.running import how_to_mend, run_step


def test_a_good_step_prints_its_name_and_logs_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_step("numbers", [sys.executable, "-c", "print(6 * 7)"], os.environ, log=tmp_path / "log")
    assert capsys.readouterr().out == "bootstrap: numbers\n"
    assert "\n42\n" in (tmp_path / "log").read_text(encoding="utf-8")


def test_a_failed_step_shows_what_it_printed_and_how_to_mend_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "import sys; print('error: dns error at https://me:secret@host/'); sys.exit(1)"]
    with pytest.raises(InstallError, match="index cannot be reached") as caught:
        run_step("torch", command, os.environ, log=tmp_path / "log")
    assert "'torch' failed:\nerror: dns error at https://***@host/" in str(caught.value)
    assert str(tmp_path / "log") in str(caught.value)


@pytest.mark.parametrize(
    ("printed", "cure"),
    [
        ("error: failed to write: No space left on device (os error 28)", "The disk is full"),
        ("invalid peer certificate: UnknownIssuer; error sending request", "PIP_CERT"),
        ("NewConnectionError: Failed to establish a new connection", "PIP_INDEX_URL"),
        ("ERROR: No matching distribution found for uv (from versions: none)", "PIP_INDEX_URL"),
        ("error: No solution found when resolving dependencies", "constraints.txt"),
        ("Segmentation fault", "remove .venv"),
    ],
)
def test_each_cause_has_its_cure(printed: str, cure: str) -> None:
    assert cure in how_to_mend(printed)
