"""What a real run tells: the dashboard on a terminal, lines in a pipe, --quiet, --json-logs, and status from outside."""

from __future__ import annotations

import codecs
import contextlib
import fcntl
import json
import os
import re
import select
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.cells import cell_len

from grpo_async.display.events import JSON_EVENTS
from tests.e2e.conftest import GoldenRun
from tests.e2e.support import REPOSITORY, SMALL, Run, make_run, status_of
from tests.support.waiting import eventually

pytestmark = pytest.mark.slow

_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_json_logs_are_the_whole_story_and_nothing_else_is_on_stdout(golden_run: GoldenRun) -> None:
    events = [json.loads(line) for line in golden_run.json_logs.splitlines()]
    names = [event["event"] for event in events]
    assert set(names) <= set(JSON_EVENTS)
    assert (names[0], names[-1]) == ("start", "end")
    assert all(isinstance(event["time"], float) for event in events)
    steps = [event for event in events if event["event"] == "step"]
    assert [event["step"] for event in steps] == [1, 2, 3, 4]
    assert all(0.0 <= event["metrics"]["servers/kv_usage"] <= 1.0 for event in steps)
    assert {"phase", "preflight", "example", "evaluation", "servers", "learning"} <= set(names)
    example = next(event for event in events if event["event"] == "example")
    assert (example["step"], [sorted(each) for each in example["completions"]][:1]) == (1, [["reward", "text"]])
    assert any(event["servers"][0]["state"] == "serving" for event in events if event["event"] == "servers")
    assert events[-1]["exit_code"] == 0
    assert events[-1]["summary"]["steps"] == 4
    memory = events[-1]["summary"]["memory"]
    assert [peak > 100 << 20 for peak in memory["peaks"]] == [True]


def test_trackers_get_what_held_out_prompts_got(golden_run: GoldenRun) -> None:
    folder = golden_run.run.folder / "trackers" / "tensorboard"
    assert f"tensorboard: tensorboard --logdir {folder}" in golden_run.json_logs
    written = b"".join(file.read_bytes() for file in folder.iterdir())
    assert all(f"### step {step}, reward ".encode() in written for step in (0, 3, 4, 6))
    assert b"**prompt**" in written
    assert b"**completion**" in written


def test_a_quiet_run_prints_its_summary_only(golden_run: GoldenRun) -> None:
    lines = [line for line in golden_run.quiet.splitlines() if not line.startswith("warning: ")]
    assert lines[0].startswith("learning "), golden_run.quiet
    assert any(line.startswith("run ") and "after 6 steps" in line for line in lines)
    assert not [
        line for line in lines if line.startswith(("step ", "logs:", "held-out at", "held-out before", "engine "))
    ]


def test_status_tells_of_a_finished_run(golden_run: GoldenRun) -> None:
    code, status = status_of(golden_run.run.folder)
    assert (code, status["state"], status["step"], status["exit_code"]) == (0, "finished", 6, 0)
    assert status["checkpoint"]["step"] == 6
    # the report's advice goes by them, and by those of status.json where a run did not come to its end
    assert isinstance(status["on_gpu"], bool)
    assert (status["engine"], status["on_gpu"]) == tuple(
        golden_run.run.summary()[name] for name in ("engine", "on_gpu")
    )


class _Terminal:
    """The run in a terminal of its own; `text` is all that it wrote."""

    def __init__(self, run: Run, *, columns: int, rows: int) -> None:
        self.controller, own = os.openpty()
        self.resize(columns, rows)
        unwanted = ("COLUMNS", "LINES", "NO_COLOR")
        environment = {name: value for name, value in os.environ.items() if name not in unwanted}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "grpo_async", "train", str(run.config)],
            cwd=REPOSITORY,
            env={**environment, "TERM": "xterm-256color"},
            stdin=own,
            stdout=own,
            stderr=own,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # so that its Ctrl-C is a signal
        )
        os.close(own)
        self.text = ""
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def resize(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self.controller, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read_until(self, condition: Callable[[], bool], *, what: str) -> None:
        def reached() -> bool:
            if select.select([self.controller], [], [], 0.2)[0]:
                with contextlib.suppress(OSError):  # the other end is closed
                    self.text += self._decoder.decode(os.read(self.controller, 1 << 16))
            return condition()

        assert eventually(reached, 120.0, every_s=0.0), f"waited for {what}; the end of it:\n{self.text[-3000:]}"

    def pictures(self) -> list[list[str]]:
        """Every whole picture of the dashboard, as lines."""
        frames = self.text.split("\x1b[H")[1:]
        plain = [_ESCAPES.sub("", frame).replace("\r", "").rstrip("\n").split("\n") for frame in frames]
        return [lines for lines in plain if lines[0].startswith("╭") and lines[-1].endswith("╯")]


@pytest.mark.nightly
def test_a_terminal_shows_the_dashboard_in_its_own_size_and_ctrl_c_stops_the_run(tmp_path: Path) -> None:
    settings = (*SMALL, "evaluation=null", "record.advise_every_steps=2", "training.max_steps=2000")
    run = make_run(tmp_path, "quickstart.yaml", settings)
    terminal = _Terminal(run, columns=80, rows=24)
    try:
        terminal.read_until(lambda: bool(re.search(r"step (?:[3-9]|\d\d+)/2000", terminal.text)), what="step 3")
        small = terminal.pictures()
        assert {len(lines) for lines in small} == {24}
        assert {cell_len(line) for lines in small for line in lines} == {80}
        assert "\x1b[?1049h" in terminal.text, "a screen of its own"
        code, status = status_of(run.folder)
        assert (code, status["state"], status["pid"]) == (0, "running", terminal.process.pid)
        assert status["servers"][0]["state"] == "serving"
        terminal.resize(120, 40)
        terminal.read_until(lambda: len(terminal.pictures()[-1]) == 40, what="a picture of the new size")
        os.write(terminal.controller, b"\x03")
        terminal.read_until(lambda: terminal.process.poll() is not None, what="the end")
        terminal.read_until(lambda: "finishing the step" in terminal.text.rpartition("\x1b[?1049l")[2], what="the rest")
    finally:
        terminal.process.kill()
        terminal.process.wait(30)
        os.close(terminal.controller)
    assert terminal.process.returncode == 130
    code, status = status_of(run.folder)
    assert (code, status["state"], status["exit_code"]) == (3, "stopped", 130)
    assert status["learning"]["text"]
