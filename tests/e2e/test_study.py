"""A study with real runs: interrupted, continued, extended; no finished run is done twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from grpo_async.findings.study import Study
from tests.e2e.support import REPOSITORY, SMALL


def _command(out: Path, *, seeds: int) -> list[str]:
    words = [word for override in [*SMALL, "training.max_steps=2"] for word in ("--set", override)]
    command = f"{sys.executable} -m grpo_async study configs/quickstart.yaml --out {out} --seeds {seeds}"
    return [*command.split(), "--vary", "optimizer.lr=[1e-5, 3e-4]", *words]


@pytest.mark.nightly
def test_a_study_that_was_interrupted_goes_on_with_the_runs_that_have_not_finished(tmp_path: Path) -> None:
    out = tmp_path / "study"
    first = subprocess.Popen(_command(out, seeds=1), cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    for line in first.stdout:
        if "1 of 2" in line:
            break
    first.send_signal(signal.SIGINT)
    first.stdout.read()
    assert first.wait(60) == 130
    (done,) = [
        path.parent for path in out.glob("*/summary.json") if json.loads(path.read_text())["status"] == "finished"
    ]
    finished_at = (done / "summary.json").stat().st_mtime_ns
    second = subprocess.run(
        [*_command(out, seeds=2), "--json-logs"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    assert (done / "summary.json").stat().st_mtime_ns == finished_at
    end = json.loads(second.stdout.splitlines()[-1])
    assert [len(setting["rewards"]) for setting in end["summary"]["settings"]] == [2, 2]
    study = Study.read(out)
    assert study is not None
    assert all(run.seconds for run in study.settings)
