"""`export-model`: which checkpoint it takes, where it writes, what it uploads. e2e/test_evaluation.py looks into the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from grpo_async.cli.app import app
from grpo_async.config import ExperimentConfig
from grpo_async.run_directory import RunDir
from tests.cli.support import MINIMAL


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


def _invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["export-model", "demo", *arguments])


@pytest.mark.parametrize(
    ("checkpoint", "step"),
    [(None, 6), ("latest", 6), ("best", 4), ("2", 2), ("runs/demo/checkpoints/step_2", 2)],
)
def test_the_checkpoint_that_is_named_is_exported(
    exported: list[tuple[int, Path]], checkpoint: str | None, step: int
) -> None:
    result = _invoke(*([] if checkpoint is None else ["--checkpoint", checkpoint]))
    assert result.exit_code == 0, result.output
    assert exported == [(step, Path(f"runs/demo/model_step_{step}"))]
    assert result.stdout == f"step {step} -> runs/demo/model_step_{step}\n"


def test_what_was_written_is_uploaded_into_a_private_repository(
    exported: list[tuple[int, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    class Hub:
        def create_repo(self, repository: str, **options: Any) -> None:
            calls.append((repository, options))

        def upload_folder(self, **options: Any) -> str:
            calls.append(("upload", options))
            return "https://hub/me/mine"

    monkeypatch.setattr("huggingface_hub.HfApi", Hub)
    result = _invoke("--checkpoint", "best", "--out", "mine", "--push-to-hub", "me/mine")
    assert result.exit_code == 0, result.output
    assert exported == [(4, Path("mine"))]
    assert calls == [
        ("me/mine", {"private": True, "exist_ok": True}),
        ("upload", {"repo_id": "me/mine", "folder_path": Path("mine")}),
    ]
    assert result.stdout.splitlines()[1:] == ["https://hub/me/mine"]
