"""`preflight` and `doctor` from the command line: what is asked of the launcher, where the output goes, exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from grpo_async.checks import doctor
from grpo_async.checks.report import Check
from grpo_async.cli.app import app
from grpo_async.config import ExperimentConfig
from grpo_async.display.output import Output
from grpo_async.launcher import train as launcher
from grpo_async.launcher.supervisor import RunOutcome
from tests.cli.support import MINIMAL

FAILED = RunOutcome(exit_code=1, checks=[Check("dtypes", "pass", "float32"), Check("disk", "fail", "full")])


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    """What the launcher was asked for: name of the run, output mode. It finds one failed check."""
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(MINIMAL, encoding="utf-8")
    made: list[tuple[str, str]] = []

    def preflight(config: ExperimentConfig, *, output: Output) -> RunOutcome:
        made.append((config.run.name, output.mode))
        print("the plan")
        return FAILED

    monkeypatch.setattr(launcher, "preflight", preflight)
    return made


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_the_preflight_gets_the_configuration_and_its_exit_code_is_that_of_the_command(calls: Any) -> None:
    result = _invoke("preflight", "x.yaml", "--set", "run.name=other", "--quiet")
    assert result.exit_code == 1
    assert calls == [("other", "quiet")]
    wrong = _invoke("preflight", "x.yaml", "--set", "optimizer.lr=-1")
    assert wrong.exit_code == 2
    assert "optimizer.lr" in wrong.stderr
    assert len(calls) == 1


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_doctor_prints_every_check_and_only_a_failed_one_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str]
) -> None:
    checks = [Check("python", "pass", "CPython"), Check("disk", "warn", "nearly full")]
    monkeypatch.setattr(doctor, "run_doctor", lambda: list(checks))
    result = _invoke("doctor", *arguments)
    assert result.exit_code == 0, result.output
    if "--json" in arguments:
        assert json.loads(result.stdout) == {
            "status": "warn",
            "checks": [
                {"name": "python", "status": "pass", "detail": "CPython"},
                {"name": "disk", "status": "warn", "detail": "nearly full"},
            ],
        }
    else:
        assert ["warn", "disk", "nearly", "full"] in [line.split() for line in result.stdout.splitlines()]
        assert result.stdout.splitlines()[-1] == "1 passed, 1 warned, 0 failed"
    checks.append(Check("torch", "fail", "not installed"))
    assert _invoke("doctor", *arguments).exit_code == 1
