"""The start-up benchmark at its smallest."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import startup
from benchmarks._startup_run import SERVER_MARKS, Watch, first_step
from tests.benchmarks.support import run_apart


def test_commands_are_measured_and_their_imports_shown(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    run_apart(
        "startup", ["--only", "validate", "inspect-rollouts", "--repeats", "1", "--skip-train", "--json", str(file)]
    )
    report = json.loads(file.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in report["rows"]}
    assert 0 < rows["python -c pass"]["median"] < rows["validate"]["median"]
    assert rows["inspect-rollouts --plain: computed"]["median"] > 0
    assert any(name.startswith("validate: importing grpo_async") for name in rows)
    assert report["notes"] == ["inspect-rollouts --plain imports duckdb, numpy"]
    targets = {target["what"]: target for target in report["targets"]}
    assert targets["heavy packages that validate imports"]["value"] == 0
    assert targets["validate, median s"]["at_most"] == 1.0


def test_the_stages_of_a_first_step_follow_each_other_and_sum_up_to_it(tmp_path: Path) -> None:
    """At 1000 s it begins; the rank starts 0.5 s later and says at 1001 that it does; it imports until 1003."""
    events = [
        ("run", "attempt", 1001.0, 1001.0),
        ("run", "import", 1001.0, 1003.0),
        ("run", "load the tokenizer", 1003.0, 1003.5),
        ("run", "loading the model", 1001.0, 1004.0),
        ("run", "waiting for the server", 1004.25, 1004.5),
        ("run", "pushing the first weights", 1004.5, 1004.75),
        ("run", "checking trainer and servers against each other", 1004.75, 1005.0),
        ("trainer", "wait for samples", 1005.0, 1006.0),
        ("trainer", "wait for samples", 1006.5, 1009.0),
    ]
    lines = [json.dumps(dict(zip(("lane", "name", "start", "end"), event, strict=True))) for event in events]
    (tmp_path / "events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with subprocess.Popen([sys.executable, "-c", "pass"]) as process:
        watch = Watch(process, tmp_path, SERVER_MARKS["embedded"], 1000.0)
    watch.starts.update(rank=0.5, server=0.25)
    watch.first_step_at = 1006.75
    found = watch.result()
    assert found.first_step_s == 6.75
    assert sum(found.stages.values()) == 6.75
    assert found.stages["launcher: configuration, checks, plan"] == 0.5
    assert "torchrun" not in found.stages
    assert found.stages["rank: imports"] == 2.0
    assert found.stages["first rollouts"] == 1.0
    assert found.stages["first step"] == 0.75
    assert found.server == {"process started": 0.25}


def test_imports_count_for_their_package_without_what_they_import() -> None:
    found = startup.import_seconds(["-X", "importtime", "-c", "import json.tool"])
    assert found["json"] > 0
    assert "torch" not in found
    assert sum(found.values()) < 60


def test_a_train_that_fails_is_shown_with_its_words(tmp_path: Path) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("run: {name: x}\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"exited with 2(.|\n)*model"):
        first_step(startup.ROOT, config, tmp_path / "runs", engine="embedded", seed=0, timeout_s=60)
