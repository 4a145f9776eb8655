"""status.json: what stands in it while a run goes and after it, and who may be believed."""

from __future__ import annotations

import io
import json
import os
import platform
import re
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console

from grpo_async.display.display import Display, StatusFile
from grpo_async.display.progress import Progress
from grpo_async.display.status import print_status, read_status
from grpo_async.errors import ConfigError, RunError
from grpo_async.run_directory import RunDir
from tests.display.support import METRICS
from tests.support.waiting import eventually

STEP = {**METRICS, "grad_norm": float("nan"), "pipeline/trainer_idle_ratio": 0.5, "pipeline/generator_idle_ratio": 0.02}
SERVER = {
    "index": 0, "url": "http://h:1", "state": "serving", "version": 3, "running": 5, "waiting": 1, "kv_usage": 0.5,
}  # fmt: skip
ABOUT = {"engine": "vllm", "on_gpu": True}


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    run_dir = RunDir(tmp_path / "runs" / "x")
    run_dir.create()
    return run_dir


class _Run(Display):
    """What the supervisor tells, and the file that is made of it."""

    def __init__(self, run_dir: RunDir) -> None:
        super().__init__(Progress(run_dir, run_name="x", max_steps=10, about=ABOUT))
        self.file = StatusFile(self.progress)
        self.views.append(self.file)


def _content(run_dir: RunDir) -> dict[str, Any]:
    content = json.loads(run_dir.status.read_text())
    assert isinstance(content, dict)
    return content


def _fill(status: Display) -> None:
    status.phase("training")
    status.show("step", step=3, max_steps=10, metrics=STEP)
    status.show("evaluation", when="before", metrics={"reward": 0.25})
    status.show("servers", servers=[SERVER])
    status.warning("the server was killed")
    status.note("no warning")


def test_it_says_what_was_reported(run_dir: RunDir) -> None:
    run_dir.checkpoint(2).mkdir(parents=True)
    (run_dir.checkpoints / "writing_step_3").mkdir()
    with _Run(run_dir) as status:
        assert _content(run_dir)["state"] == "running", "written at once"
        _fill(status)
        assert eventually(lambda: _content(run_dir)["last_warning"] is not None, 10.0)
    content = _content(run_dir)
    expected = {
        "run": "x", "step": 3, "max_steps": 10, "engine": "vllm", "on_gpu": True,
        "eta_s": 14.0,  # 7 steps x 2 s
        "reward": {"last": 0.53, "average": 0.53, "curve": [0.53]},
        "ledger": {"groups": {"queued": 3, "trained": 12, "in_flight": 16}, "tokens": {"trained": 1200}},
        "evaluations": {"before": {"reward": 0.25}}, "host": platform.node(), "pid": os.getpid(),
        "pid_started_at": psutil.Process().create_time(),
    }  # fmt: skip
    assert {name: content[name] for name in expected} == expected
    assert content["metrics"]["grad_norm"] is None
    assert (content["checkpoint"]["step"], content["checkpoint"]["writing"]) == (2, 3)


@pytest.mark.parametrize(("state", "code"), [("finished", 0), ("stopped", 130), ("failed", 1)])
def test_the_end_is_said_and_an_exception_is_a_failure(run_dir: RunDir, state: str, code: int) -> None:
    with _Run(run_dir) as status:
        pass
    status.file.end(state, exit_code=code, error=None)
    content, found = _content(run_dir), read_status(run_dir)
    assert (content["state"], content["exit_code"], content["eta_s"]) == (state, code, None)
    assert (found.state, found.exit_code) == (state, {"finished": 0, "stopped": 3, "failed": 1}[state])
    with pytest.raises(ZeroDivisionError), _Run(run_dir):
        raise ZeroDivisionError("no samples")
    assert (_content(run_dir)["state"], _content(run_dir)["error"]) == ("failed", "ZeroDivisionError: no samples")


def test_a_disk_that_cannot_be_written_does_not_end_the_run(run_dir: RunDir) -> None:
    run_dir.status.mkdir()  # os.replace fails on it, for root, too
    with _Run(run_dir) as status:
        status.show("step", step=1, max_steps=10, metrics=STEP)
    assert status.progress.content()["step"] == 1
    assert run_dir.status.is_dir()


def test_what_is_no_status_is_said(run_dir: RunDir) -> None:
    with pytest.raises(ConfigError, match=r"has no status\.json"):
        read_status(run_dir)
    for text in ("", "[]", '{"version": 99, "state": "running"}', '{"version": 1, "state": "odd"}'):
        run_dir.status.write_text(text)
        with pytest.raises(RunError, match=r"status\.json"):
            read_status(run_dir)


def _table(run_dir: RunDir) -> str:
    console = Console(file=io.StringIO(), width=100, force_terminal=True, color_system=None)
    print_status(console, read_status(run_dir))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_tells_what_people_ask_for_and_no_text_is_obeyed(run_dir: RunDir) -> None:
    with _Run(run_dir) as status:
        _fill(status)
        status.warning("bad\x1b[2J\nworse")
    run_dir.metrics.write_text(
        "".join(json.dumps({"step": n, "reward": 0.1 * n + 0.01 * (n % 2)}) + "\n" for n in range(1, 9))
    )
    text = _table(run_dir)
    for part in ("running", "3/10", "30%", "14 s left", "0.530 (all groups", "trained 12", "h:1  serving  v3  run 5  wait 1",
                 "KV 50%", "before 0.250", "learning", "rose", "bad worse", str(os.getpid())):  # fmt: skip
        assert part in text, f"{part!r} is missing:\n{text}"
    assert "\x1b" not in text


def test_a_run_that_has_ended_is_not_described_as_alive(run_dir: RunDir) -> None:
    with _Run(run_dir) as status:
        _fill(status)
        status.file.end("finished", exit_code=0, error=None)
    text = _table(run_dir)
    for part in ("server 0", "serving", "http://h:1", " left", "elapsed", "s/step", "last update"):
        assert part not in text, f"{part!r} is of a run that goes on:\n{text}"
    assert re.search(r"ended \d+ s ago", text)
    run_dir.summary.write_text(json.dumps({"wall_s": 75}))
    assert "1:15" in _table(run_dir)
