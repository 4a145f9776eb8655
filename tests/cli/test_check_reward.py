"""`check-reward`: what its table says of good and bad rewards, exit codes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from grpo_async.cli.app import app

AUDITED = "tests.rewards.audited_rewards"
CONFIG = """\
run: {name: demo}
model: {path: m}
data: {train: {type: jsonl, path: rows.jsonl}}
inference: {engine: embedded}
"""


@pytest.fixture(autouse=True)
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _write_rows([{"prompt": f"What is {n} + 30?", "answer": str(n + 30)} for n in range(12, 22)])


def _write_rows(rows: list[dict[str, Any]]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def _check(rewards: list[dict[str, Any]], *arguments: str, more: str = "") -> Result:
    Path("x.yaml").write_text(f"{CONFIG}rewards: {json.dumps(rewards)}\n{more}", encoding="utf-8")
    return CliRunner().invoke(app, ["check-reward", "x.yaml", *arguments])


def _reward(attribute: str, **section: Any) -> dict[str, Any]:
    return {"function": f"{AUDITED}:{attribute}", **section}


def _report(reward: dict[str, Any], code: int = 0) -> dict[str, Any]:
    result = _check([reward], "--rows", "3", "--json")
    assert result.exit_code == code, result.output
    (report,) = json.loads(result.stdout)["rewards"]
    assert isinstance(report, dict)
    return report


def test_a_table_says_what_is_paid() -> None:
    result = _check([_reward("honest")], "--rows", "2")
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["honest"]
    assert ["right", "answer", "1", "1", "1"] in rows
    assert ["wrong", "answer", "0", "0", "0"] in rows
    assert ["garbage", "0", "0", "0"] in rows


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        ("raises_on_empty", "IndexError: list index out of range"),
        ("substring", "`counting` gets as much as the right answer, on rows 0, 1, 2"),
    ],
)
def test_each_fault_is_an_error(function: str, problem: str) -> None:
    assert problem in "\n".join(_report(_reward(function), code=1)["problems"])


@pytest.mark.parametrize(
    ("function", "problem"),
    [("dies", "ended with exit code 7 during the call"), ("catastrophic", "took longer than 0.5 s")],
)
def test_a_function_that_ends_or_holds_its_process_does_not_hold_up_the_check(function: str, problem: str) -> None:
    assert problem in "\n".join(_report(_reward(function, timeout_s=0.5), code=1)["problems"])
