"""`preflight` from the command line: what it asks of the launcher, and where its output goes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from grpo_async.checks.report import Check
from grpo_async.cli.app import app
from grpo_async.config import ExperimentConfig
from grpo_async.launcher import train as launcher

CONFIG = """\
run: {name: demo}
model: {path: m}
data: {train: {type: jsonl, path: t}}
rewards: [{function: "a:b"}]
inference: {engine: embedded}
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What the launcher was asked for. It finds one failed check."""
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(CONFIG, encoding="utf-8")
    made: list[dict[str, Any]] = []

    def launch(config: ExperimentConfig, **options: Any) -> int:
        made.append({"config": config, **options})
        print("the plan")
        if "on_checks" in options:
            options["on_checks"]([Check("dtypes", "pass", "float32"), Check("disk", "fail", "full")])
        return 1

    monkeypatch.setattr(launcher, "launch", launch)
    return made


def _preflight(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["preflight", "x.yaml", *arguments])


def test_it_is_a_launch_that_ends_after_the_checks(calls: list[dict[str, Any]]) -> None:
    result = _preflight("--set", "run.name=other")
    assert result.exit_code == 1
    (call,) = calls
    assert call.pop("config").run.name == "other"
    assert call.pop("output").mode == "full"
    assert call == {"resume": None, "clean": False, "dry_run": False, "preflight_only": True}


def test_json_is_alone_on_stdout(calls: list[dict[str, Any]]) -> None:
    result = _preflight("--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["status"] == "fail"
    assert [check["name"] for check in report["checks"]] == ["dtypes", "disk"]
    assert "the plan" in result.stderr


def test_a_wrong_configuration_is_exit_code_2(calls: list[dict[str, Any]]) -> None:
    result = _preflight("--set", "optimizer.lr=-1")
    assert result.exit_code == 2
    assert "optimizer.lr" in result.stderr
    assert calls == []


def test_json_without_checks_prints_none(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """The run broke before it came to them; the error is on stderr."""

    def broken(config: ExperimentConfig, **_: Any) -> int:
        print("error: the server died", file=sys.stderr)
        return 1

    monkeypatch.setattr(launcher, "launch", broken)
    result = _preflight("--json")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "the server died" in result.stderr
