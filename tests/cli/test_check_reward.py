"""`check-reward` from the command line: exit codes, both forms of the report, what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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


def test_a_table_says_what_is_paid_and_an_error_is_exit_code_1_with_what_to_do() -> None:
    result = _check([_reward("honest")], "--rows", "2")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["honest", "(in:", "thread)"]
    assert ["right", "answer", "1", "1", "1"] in [line.split() for line in lines]
    assert ["garbage", "0", "0", "0"] in [line.split() for line in lines]
    assert lines[-1] == "1 reward function checked: 0 errors, 0 warnings."
    result = _check([_reward("substring")], "--rows", "2")
    assert result.exit_code == 1
    assert (
        "error: It rewards `counting`: on row 0 it got 1, as much as the right answer. A policy finds" in result.stdout
    )
    assert "Rows: 0, 1." in result.stdout
    result = _check([_reward("constant")], "--rows", "2")
    assert result.exit_code == 0
    assert "warning: It gives every completion the same score (1)." in result.stdout


def test_several_functions_are_reported_in_their_order_and_json_holds_everything() -> None:
    result = _check([_reward("substring"), _reward("form_only", name="form")], "--rows", "3", "--json")
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    substring, form = report["rewards"]
    assert (substring["name"], form["name"], report["notes"]) == ("substring", "form", [])
    assert substring["scores"]["right answer"] == {"lowest": 1.0, "mean": 1.0, "highest": 1.0}
    assert [finding["severity"] for finding in form["findings"]] == ["note"]
    counting = next(finding for finding in substring["findings"] if "counting" in finding["title"])
    assert (counting["severity"], counting["rows"]) == ("error", [0, 1, 2])


@pytest.mark.parametrize("run_in", ["thread", "process"])
def test_what_a_function_prints_does_not_get_into_the_report_and_no_heavy_library_is_loaded(run_in: str) -> None:
    Path("x.yaml").write_text(f"{CONFIG}rewards: {json.dumps([_reward('prints', run_in=run_in)])}\n", encoding="utf-8")
    script = (
        "import sys\nfrom grpo_async.cli import main\n"
        "try:\n    main(['check-reward', 'x.yaml', '--json', '--rows', '1'])\n"
        "finally:\n    assert not {'torch', 'transformers', 'vllm', 'datasets'} & set(sys.modules)\n"
    )
    command = [sys.executable, "-c", script]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    environment.pop("PYTHONUNBUFFERED", None)  # lines must not be lost with a killed worker where nobody has set it
    result = subprocess.run(command, capture_output=True, text=True, timeout=120.0, check=True, env=environment)
    assert json.loads(result.stdout)["rewards"][0]["name"] == "prints"
    assert "a line on stdout" in result.stderr


def test_the_gold_column_may_have_any_name() -> None:
    _write_rows([{"prompt": f"{n}?", "right": f"{n}"} for n in (12, 13)])
    result = _check([_reward("form_only")])
    assert "note: No column is one of answer, solution, ground_truth, target, label" in result.stdout
    result = _check([_reward("form_only")], "--gold-column", "right")
    assert "No column is one of" not in result.stdout
    result = _check([_reward("form_only")], "--gold-column", "left")
    assert result.exit_code == 2
    assert "--gold-column left: the data has no such column; it has ['right']" in result.stderr


@pytest.mark.parametrize(
    ("rewards", "text"),
    [
        ([_reward("no_such_function")], "rewards.0.function"),
        ([{"function": "tests.rewards.trl_style_rewards:boxed_reward"}], "needs the column(s) ['ground_truth']"),
        ([_reward("wants_environments")], "needs `environments`, but the run has none"),
        ([_reward("wants_environments", run_in="process")], "cannot be sent to another one"),
    ],
)
def test_a_wrong_configuration_is_exit_code_2_without_a_traceback(rewards: list[dict[str, Any]], text: str) -> None:
    result = _check(rewards)
    assert result.exit_code == 2
    assert text in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_functions_that_need_a_rollout_are_skipped_with_a_note() -> None:
    environments = 'environments: {e: {factory: "a:b"}}\n'
    result = _check([_reward("wants_environments"), _reward("honest")], "--rows", "1", more=environments)
    assert result.exit_code == 0, result.output
    assert "note: wants_environments is skipped: it needs `environments`, which only a rollout has." in result.stdout
    assert "The rewards that environments (`get_reward`) and agents give are not checked here." in result.stdout
    assert "1 reward function checked" in result.stdout
    own = 'rollout_function: {function: "a:b"}\n'
    result = _check([{"function": "tests.rewards.trl_style_rewards:boxed_reward"}], "--rows", "1", more=own)
    assert result.exit_code == 0, result.output
    assert "boxed_reward is skipped: it needs the column(s) ['ground_truth']" in result.stdout
    assert "0 errors" not in result.stdout  # nothing was checked, which is no pass
    assert "No reward function was checked" in result.stdout
