"""`grpo-async export`, as people call it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import duckdb
import pytest
from typer.testing import CliRunner

from grpo_async.cli.app import app
from tests.store.builders import append_simple
from tests.support.stored import LineStore


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Rollouts of two steps, and an evaluation of step 2."""
    for folder, groups in (("rollouts", 3), ("evaluations/step_2", 1)):
        with LineStore(tmp_path / "demo" / folder) as store:
            for group_id in range(groups):
                append_simple(store, group_id, step=1 + group_id // 2, rewards=(0.0, 1.0))
    return tmp_path / "demo"


def _export(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["export", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_json_lines_go_to_the_standard_output(run: Path) -> None:
    code, out, err = _export(str(run), "reward=1 and step=1")
    assert (code, err) == (0, "")
    assert [json.loads(line)["rollout_id"] for line in out.splitlines()] == ["0-1", "1-1"]
    assert _export(str(run), "reward>5") == (0, "", "no rollout matches\n")


def test_the_name_of_the_file_says_the_format(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "found.parquet"
    code, stdout, err = _export(str(run), "--out", str(out))
    assert (code, stdout) == (0, "")
    assert "6 rollouts of 3 groups ->" in err
    with duckdb.connect() as connection:
        assert connection.execute("SELECT sum(reward) FROM read_parquet(?)", [str(out)]).fetchall() == [(3.0,)]


def test_an_evaluation_is_exported(run: Path) -> None:
    for step in ("2", "latest"):
        code, out, _ = _export(str(run), "--evaluation", step)
        assert (code, len(out.splitlines())) == (0, 2)
    code, _, err = _export(str(run), "--evaluation", "7")
    assert code == 2
    assert "it has: 2" in err


def test_lines_on_a_terminal_are_shown_and_not_obeyed(run: Path, tmp_path: Path) -> None:
    hostile = "\x9b31m\x7f\u202e\u200f\u061c\x1b]0;x\x07"
    with LineStore(run / "rollouts") as store:
        append_simple(store, 9, answer=hostile, rewards=(1.0,))
    file = tmp_path / "out.jsonl"
    assert _export(str(run), "group_id=9", "--out", str(file))[0] == 0
    for out in (_export(str(run), "group_id=9")[1], file.read_text(encoding="utf-8")):
        assert not set("\x9b\x7f\u202e\u200f\u061c\x1b\x07") & set(out)
        assert json.loads(out)["completion_text"] == hostile


def test_mistakes_end_with_2_and_say_what_to_do(run: Path, tmp_path: Path) -> None:
    code, _, err = _export(str(run), "rewad<1")
    assert code == 2
    assert "did you mean reward" in err
    assert err.splitlines()[1:] == ["  rewad<1", "  ^^^^^"]
    code, _, err = _export(str(run), "--out", str(tmp_path / "x.csv"))
    assert (code, (tmp_path / "x.csv").exists()) == (2, False)
    assert "the extension says the format" in " ".join(err.split())
    code, _, err = _export(str(run), "--out", str(tmp_path / "no" / "file.jsonl"))
    assert code == 2
    assert "there is no folder" in err


def test_damage_ends_with_1_and_names_the_way_round(run: Path) -> None:
    (lines,) = (run / "rollouts").glob("*.jsonl")
    lines.write_bytes(b"{}\n" + lines.read_bytes())
    code, out, err = _export(str(run))
    assert (code, out) == (1, "")
    assert f"{lines}: left out 1 damaged line" in err
    assert "--skip-damaged" in err
    code, out, err = _export(str(run), "--skip-damaged")
    assert (code, len(out.splitlines())) == (0, 6)
    assert err.startswith("note: ")


def test_a_pipe_that_closes_early_is_no_error(run: Path) -> None:
    with LineStore(run / "rollouts") as store:
        for group_id in range(10, 60):
            append_simple(store, group_id, text="x" * 5000)
    command = [sys.executable, "-m", "grpo_async", "export", str(run)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(command, env=buffered, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0
