"""`doctor` from the command line: table, JSON, exit codes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner, Result

from grpo_async.checks import doctor
from grpo_async.checks.report import Check
from grpo_async.cli.app import app


def _doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", *arguments])


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """What the doctor finds; `full` adds a line."""
    checks = [Check("python", "pass", "CPython"), Check("disk", "warn", "nearly full")]

    def run(*, full: bool = False) -> list[Check]:
        return [*checks, Check("vllm import", "pass", "works")] if full else list(checks)

    monkeypatch.setattr(doctor, "run_doctor", run)
    return checks


def test_warnings_alone_are_exit_code_0(found: list[Check]) -> None:
    result = _doctor()
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["warn", "disk", "nearly", "full"] in lines
    assert result.stdout.splitlines()[-1] == "1 passed, 1 warned, 0 failed"


def test_a_failed_check_is_exit_code_1(found: list[Check]) -> None:
    found.append(Check("torch", "fail", "not installed"))
    assert _doctor().exit_code == 1
    assert _doctor("--json").exit_code == 1


def test_json_has_every_check(found: list[Check]) -> None:
    report = json.loads(_doctor("--json").stdout)
    assert report == {
        "status": "warn",
        "checks": [
            {"name": "python", "status": "pass", "detail": "CPython"},
            {"name": "disk", "status": "warn", "detail": "nearly full"},
        ],
    }


def test_full_looks_further(found: list[Check]) -> None:
    assert "vllm import" in _doctor("--full").stdout
    assert "vllm import" not in _doctor().stdout
