"""The dashboard and the rows of a run: never more than the terminal has, and no text that escapes from it."""

from __future__ import annotations

import io
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console

from grpo_async.display import render
from grpo_async.display.render import screen
from tests.display.support import METRICS

NOW = 2_000_000_000.0
LEARNING = {
    "text": "It learns: the held-out reward rose from 0.3 to 0.456.",
    "fix": "Raise rollout.max_in_flight 64 -> 96.",
}
SERVER = {"index": 0, "url": "http://10.0.0.0:8000", "state": "serving", "version": 12, "running": 60, "waiting": 3,
          "kv_usage": 0.38, "restarts": 0}  # fmt: skip
GONE = {"state": "down", "reason": "killed by SIGKILL", "restarts": 1, "running": None, "kv_usage": None}
DOWN = {**SERVER, **GONE, "index": 1}
WRONG = "8, since " + "I think " * 60 + "so it is 8"
CONTENT: dict[str, Any] = {
    "run": "x", "state": "running", "phase": "training", "phase_since": NOW - 30, "step": 12, "max_steps": 60, "eta_s": 96.0,
    "started_at": NOW - 70, "reward": {"curve": [0.04 * step for step in range(1, 13)]}, "metrics": METRICS, "learning": LEARNING,
    "servers": [SERVER, DOWN], "evaluations": {"before": {"reward": 0.3}, "step 10": {"reward": 0.456}},
    "example": {"step": 10, "prompt": "3 + 4 =", "completions": [{"reward": 1.0, "text": "7"}, {"reward": 0.0, "text": WRONG}]},
    "checkpoint": {"step": 10, "at": NOW - 75, "writing": 20}, "last_warning": {"at": NOW - 3, "text": "a server was killed"},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(render, "time", Mock(time=lambda: NOW))


def _text(content: dict[str, Any], width: int, height: int) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    console.print(screen(content, (width, height), footer="logs: runs/x/logs/latest"))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (20, 5), (300, 100)])
@pytest.mark.parametrize(
    "content", [CONTENT, {"run": "x", "state": "running", "phase": "starting", "step": 0, "max_steps": None}]
)
def test_the_dashboard_has_exactly_the_size_of_the_terminal(content: dict[str, Any], width: int, height: int) -> None:
    lines = _text(content, width, height).splitlines()
    assert [len(line) for line in lines] == [width] * height


def test_the_dashboard_shows_what_matters_at_80_by_24() -> None:
    text = _text(CONTENT, 80, 24)
    for part in (
        "x · training", "12/60", "1:36 left", "It learns: the held-out", "Raise rollout.max_in_flight", "training (30 s)",
        "a server was killed", "before 0.300  step 10 0.456", "█", "10.0.0.0:8000  serving  v12  run 60", "killed by SIGKILL",
        "servers idle 30%", "1.000  7", "so it is 8", "step 10  1:15 ago  writing step 20", "logs: runs/x/logs/latest",
    ):  # fmt: skip
        assert part in text, f"{part!r} is missing:\n{text}"


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (10, 3)])
def test_hostile_text_stays_inside_the_frame(width: int, height: int) -> None:
    bad = "a\x1b]0;x\x07b\x1b[2Jc\rd\n\u202ee" + "w" * 500
    hostile = {
        **CONTENT, "phase": bad, "evaluations": {bad: {"reward": 1.0}}, "learning": {"text": bad, "fix": bad},
        "servers": [{**DOWN, "url": bad, "reason": bad, "kv_usage": float("nan")}],
        "example": {"step": 1, "prompt": bad, "completions": [{"reward": 0.5, "text": bad}]},
    }  # fmt: skip
    text = _text(hostile, width, height)
    assert max(len(line) for line in text.splitlines()) <= width
    assert not set("\x1b\r\x07\u202e") & set(text)
