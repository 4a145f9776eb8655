"""The start-up benchmark at its smallest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from benchmarks import startup
from benchmarks._startup_run import SERVER_MARKS, Watch, first_step
from tests.benchmarks.support import run_apart


@pytest.mark.nightly
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


def test_the_median_decides_and_checkouts_are_compared_round_by_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three rounds after one that compiles: --help takes 0.25, 0.75 and 0.5 s, and half as long as the other's."""
    runs: dict[tuple[str, Path], int] = {}

    def run_python(arguments: Sequence[str], root: Path) -> tuple[float, float]:
        number = runs[key] = runs.get(key := (arguments[-1], root), -1) + 1
        seconds = (100.0, 0.25, 0.75, 0.5)[number] * (2 if root == tmp_path else 1)
        return seconds, seconds / 4

    monkeypatch.setattr(startup, "_run_python", run_python)
    monkeypatch.setattr(startup, "import_seconds", lambda arguments: {"rich": 0.125, "torch": 2.0, "json": 0.5})
    file = tmp_path / "report.json"
    asked = ["--only", "help", "validate", "--repeats", "3", "--skip-train", "--against", str(tmp_path)]
    assert startup.main([*asked, "--json", str(file)]) == 1
    report = json.loads(file.read_text(encoding="utf-8"))
    rows = {row["name"]: row["values"] for row in report["rows"]}
    assert rows["--help"] == [0.25, 0.75, 0.5]
    assert rows["--help: computed"] == [0.0625, 0.1875, 0.125]
    assert rows["--help, other"] == [0.5, 1.5, 1.0]
    assert rows["--help, this / other"] == rows["--help: computed, this / other"] == [0.5] * 3
    assert rows["--help: importing torch"] == [2000.0]
    targets = {target["what"]: (target["value"], target["at_most"], target["met"]) for target in report["targets"]}
    assert targets == {
        "heavy packages that --help imports": (1, 0, False),
        "heavy packages that validate imports": (1, 0, False),
        "--help, median s": (0.5, 0.3, False),
        "validate, median s": (0.5, 1.0, True),
    }


def test_wall_and_computed_seconds_of_a_command() -> None:
    """It sleeps for 0.5 s and computes for 0.2 s."""
    code = "import time; time.sleep(0.5)\nwhile time.process_time() < 0.2: pass"
    wall, computed = startup._run_python(["-c", code], startup.ROOT)
    assert wall >= 0.6
    assert 0.2 <= computed <= wall - 0.4


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
    lines = ["self [us] | cumulative | imported package", "     490 |      16266 |   rich.text", "    1500 |       1500 | rich",
             "     250 |        250 |     os.path"]  # fmt: skip
    said = "\n".join(f"import time: {line}" for line in [*lines, "another | line"])
    found = startup.import_seconds(["-c", f"import sys; sys.stderr.write({said!r})"])
    assert found == pytest.approx({"rich": 0.00199, "os": 0.00025})


def test_a_train_that_fails_is_shown_with_its_words(tmp_path: Path) -> None:
    config = tmp_path / "bad.yaml"
    config.write_text("run: {name: x}\n", encoding="utf-8")
    with pytest.raises(RuntimeError, match=r"exited with 2(.|\n)*model"):
        first_step(startup.ROOT, config, tmp_path / "runs", engine="embedded", seed=0, timeout_s=60)
