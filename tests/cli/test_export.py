"""`export` and `export-model`, as people call them. e2e/test_evaluation.py looks into the model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from grpo_async.cli.app import app
from grpo_async.config import ExperimentConfig
from grpo_async.run_directory import RunDir
from tests.store.builders import append_simple
from tests.support.configs import MINIMAL
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


def test_damage_ends_with_1_and_names_the_way_round(run: Path) -> None:
    (lines,) = (run / "rollouts").glob("*.jsonl")
    lines.write_bytes(b"{}\n" + lines.read_bytes())
    code, out, err = _export(str(run))
    assert (code, out) == (1, "")
    assert f"left out 1 damaged line of {lines}" in err
    assert "--skip-damaged" in err
    code, out, err = _export(str(run), "--skip-damaged")
    assert (code, len(out.splitlines())) == (0, 6)
    assert err.startswith("note: ")


# ---- export-model ----


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, Path]]:
    """(step, folder) of every export; the run `demo` has checkpoints of the steps 2, 4 and 6, of which 4 is the best."""
    run_dir, done = RunDir(tmp_path / "runs" / "demo"), []
    run_dir.create(MINIMAL)
    for step in (2, 4, 6):
        run_dir.checkpoint(step).mkdir()
    scores = ((0, 0.95), (2, 0.2), (3, 0.9), (4, 0.8), (6, 0.3))  # of 0 and 3 there is no checkpoint
    lines = [json.dumps({"step": step, "metrics": {"reward": score}}) + "\n" for step, score in scores]
    run_dir.evaluation_log.write_text("".join(lines), encoding="utf-8")

    def export(run: RunDir, step: int, config: ExperimentConfig, folder: Path) -> None:
        assert run.root.name == "demo"
        done.append((step, folder))

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("grpo_async.training.export.export_checkpoint", export)
    return done


def _export_model(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["export-model", "demo", *arguments])


@pytest.mark.parametrize(
    ("checkpoint", "step"),
    [(None, 6), ("best", 4), ("runs/demo/checkpoints/step_2", 2)],
)
def test_the_checkpoint_that_is_named_is_exported(
    exported: list[tuple[int, Path]], checkpoint: str | None, step: int
) -> None:
    result = _export_model(*([] if checkpoint is None else ["--checkpoint", checkpoint]))
    assert result.exit_code == 0, result.output
    assert exported == [(step, Path(f"runs/demo/model_step_{step}"))]
    assert result.stdout == f"step {step} -> runs/demo/model_step_{step}\n"


@pytest.mark.parametrize("out", ["runs/demo", "notes.txt"])
def test_an_export_replaces_nothing_but_a_model(exported: list[tuple[int, Path]], out: str) -> None:
    Path("notes.txt").touch()
    result = _export_model("--out", out)
    assert (result.exit_code, exported) == (2, [])
    assert "is not a model's folder" in " ".join(result.stderr.replace("│", "").split())
