"""What the user sees while a run goes on and when it has ended: lines, dashboard, warnings alone, events, the summary."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from pathlib import Path
from threading import Event, Thread
from typing import Any

import pytest
from rich.console import Console

from grpo_async.display import display as display_module
from grpo_async.display.display import Display, InThread, JsonView, LineView, LiveView
from grpo_async.display.output import Output, OutputMode
from grpo_async.display.progress import Progress
from grpo_async.display.summary import print_summary
from grpo_async.findings import RunHistory
from grpo_async.run_directory import RunDir
from grpo_async.tracking.evaluation_record import EvaluationRecord
from grpo_async.utils.safe_text import plain
from tests.display.support import METRICS
from tests.support.waiting import eventually

LITTLE = {"name": "memory", "status": "warn", "detail": "little\x1b[2J"}
ENOUGH = {"name": "disk", "status": "pass", "detail": "enough"}


def _console(*, terminal: bool = False, width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, height=24, highlight=False, _environ={})


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _progress(max_steps: int = 60, *, run_dir: Path = Path("runs/x")) -> Progress:
    return Progress(RunDir(run_dir), run_name="x", max_steps=max_steps)


def _lines(console: Console, *, quiet: bool = False) -> Display:
    progress = _progress()
    return Display(progress, [LineView(console, progress, quiet=quiet)])


def _step(display: Display, step: int, metrics: dict[str, float], max_steps: int = 60) -> None:
    display.show("step", step=step, max_steps=max_steps, metrics=metrics)


def test_each_step_is_one_plain_line_and_missing_metrics_are_left_out() -> None:
    console = _console()
    with _lines(console) as display:
        _step(display, 10, {"reward": float("nan"), "sync/push_s": 0.5, "servers/serving": 2.0})
        _step(display, 11, {"reward": 0.51, "step_time": 2.0})
        completions = [{"reward": 1.0, "text": "it is\n7"}, {"reward": 0.0, "text": "8\x1b[2J"}]
        display.show("example", step=11, prompt="3 + 4\n=", completions=completions)
        _step(display, 12, {"reward": 0.53, "servers/serving": 1.0, "servers/restarts": 3.0})
        display.show("evaluation", when="after", metrics={"reward": 0.9, "mean_length": 20.0})
    assert _text(console).splitlines() == [
        "logs: runs/x/logs/latest",
        "step 10/60  push 0.50 s",
        "step 11/60  reward 0.510 (all groups)  2.0 s/step  1:38 left",  # 49 steps x 2 s = 98 s
        "prompt of step 11: 3 + 4 =",
        "  reward 1.000: it is 7",
        "  reward 0.000: 8",
        "step 12/60  reward 0.530 (all groups, +0.020)  servers 1  restarts 3  1:36 left",
        "held-out after training: reward 0.900  mean_length 20.000",
    ]


def test_no_text_of_others_moves_the_cursor() -> None:
    console, bad = _console(), "a\x1b]0;x\x07b\x1b[2Jc\rd"
    with _lines(console) as display:
        display.phase(bad)
        display.note(bad)
        display.show("evaluation", when=f"step {bad}", metrics={"mean_length": 1.0})
        display.warning(bad)
        display.show("preflight", checks=[{"name": bad, "status": "fail", "detail": bad}])
    assert not set("\x1b\r") & set(_text(console))
    assert _text(console).count("abcd") == 6


@pytest.mark.parametrize("mode", [OutputMode.FULL, OutputMode.JSON])
def test_a_run_does_not_wait_for_a_pipe_that_nobody_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: OutputMode
) -> None:
    """As `| less` or Ctrl-S; what was said meanwhile comes later, in order, and the end last."""
    monkeypatch.setattr(display_module, "_END_TIMEOUT_S", 0.01)
    is_over = Event()

    def run() -> None:
        with output.display(run_name="x", max_steps=1, run_dir=RunDir(tmp_path)) as display:
            for number in range(5000):  # more than a pipe holds
                display.note(f"note {number} of a run that tells much")
        is_over.set()
        output.end(exit_code=0, error=None, summary={}, show=lambda console: console.print("the end", 5000))
        pipe.close()

    reader, writer = os.pipe()
    with open(reader) as lines, open(writer, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        output = Output(mode)
        Thread(target=run, daemon=True).start()
        assert is_over.wait(30.0)
        told = re.findall(r"note (\d+)|(end)", lines.read())
    assert [number or end for number, end in told] == [*map(str, range(5000)), "end"]


def test_silence_is_broken_by_what_the_run_is_doing_and_how_far_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that starts (the last line of its log), then an evaluation with a slow reward."""
    monkeypatch.setattr(display_module, "_INTERVAL_S", 0.01)
    monkeypatch.setattr(display_module, "_SILENCE_S", 0.05)
    console, progress = _console(width=200), _progress(run_dir=tmp_path)
    logs = tmp_path / "logs" / "latest"
    logs.mkdir(parents=True)
    (logs / "server.log").write_text("loading\nCapturing CUDA graphs 40%\n")
    with Display(progress, [InThread(LineView(console, progress))]) as display:
        display.phase("waiting for the server")
        progress._content["phase_since"] = time.time() - 150
        assert eventually(
            lambda: "waiting for the server (2:30); server.log: Capturing CUDA graphs 40%" in _text(console), 10.0
        )
        display.show("servers", servers=[{"index": 0, "state": "serving"}])
        display.phase("evaluating")
        display.phase("evaluating: 12 of 200 prompts")
        assert eventually(lambda: "evaluating: 12 of 200 prompts (0 s)\n" in _text(console), 10.0)
    assert _text(console).splitlines().count("evaluating") == 1, "how far it is makes no line of its own"


def test_a_quiet_run_tells_of_warnings_only() -> None:
    console = _console()
    with _lines(console, quiet=True) as display:
        display.phase("training")
        _step(display, 1, METRICS, 2)
        display.note("the server starts again")
        display.show("preflight", checks=[ENOUGH, LITTLE])
        display.warning("the server was killed\x1b[2J")
    assert _text(console).splitlines() == ["preflight: warn: memory: little", "warning: the server was killed"]


def test_the_dashboard_leaves_what_was_said_when_it_goes(tmp_path: Path) -> None:
    console, progress = _console(terminal=True), _progress(2, run_dir=tmp_path)
    with Display(progress, [LiveView(console, progress)]) as display:
        _step(display, 1, METRICS, 2)
        display.show("evaluation", when="before", metrics={"reward": 0.5})
        display.show("preflight", checks=[LITTLE])
    after = plain(_text(console).rpartition("\x1b[?1049l")[2]).splitlines()  # the alternate screen is left
    assert [line for line in after if line.strip()] == [
        "held-out before training: reward 0.500",
        "preflight: 0 passed, 1 warned, 0 failed",
        "warning: preflight: warn: memory: little",
    ]


def test_events_have_what_the_help_says_and_servers_come_when_a_state_changes() -> None:
    file = io.StringIO()
    with Display(_progress(4), [JsonView(file)]) as display:
        _step(display, 2, {"step_time": 3.0, "grad_norm": float("nan")}, 4)
        for state, running in (("serving", 1), ("serving", 2), ("down", 0)):
            display.show("servers", servers=[{"index": 0, "state": state, "running": running}])
        display.show("preflight", checks=[ENOUGH])
    step, *servers, preflight = [json.loads(line) for line in file.getvalue().splitlines()]
    assert (step.pop("time") > 0, step) == (
        True,
        {
            "event": "step",
            "step": 2,
            "max_steps": 4,
            "eta_s": 6.0,
            "reward_change": None,
            "metrics": {"step_time": 3.0, "grad_norm": None},
        },
    )
    assert [event["servers"][0]["state"] for event in servers] == ["serving", "down"]
    assert preflight["checks"] == [ENOUGH]


def test_averages_and_changes_are_what_their_formulas_say_also_after_a_step_runs_again() -> None:
    display = Display(_progress())
    assert display.progress.reward_change is None
    for step, reward in ((1, 0.4), (2, 0.6), (3, 0.9), (3, 0.7)):  # the ranks went on from step 2
        _step(display, step, {"reward": reward})
    assert display.progress.reward_change == pytest.approx(0.2)  # 0.7 - (0.4 + 0.6) / 2
    expected = {"last": 0.7, "average": 1.7 / 3, "curve": [0.4, 0.6, 0.7]}
    assert display.progress.content()["reward"] == pytest.approx(expected)


# The summary.


def _summary(run_dir: Path = Path("runs/x"), **fields: Any) -> str:
    console = _console(width=200)
    print_summary(console, RunHistory(**fields), run_dir)
    return _text(console)


def test_the_summary_says_what_was_reached_and_what_to_do_next() -> None:
    ledger = {"started": 100.0, "trained": 90.0, "filtered": 6.0, "cancelled": 4.0}
    row = {"step_time": 2.5, "perf/generated_tokens_per_s": 1234.0, "perf/trained_tokens_per_s": 987.0,
           "pipeline/trainer_idle_ratio": 0.12, "pipeline/generator_idle_ratio": 0.3, "async/staleness_mean": 0.75,
           "async/staleness_max": 1.0, **{f"ledger/groups/{name}": value for name, value in ledger.items()}}  # fmt: skip
    metrics = [{**row, "step": float(step), "reward": 0.01 * step, "source/a/reward": 0.5} for step in range(1, 61)]
    results = [
        EvaluationRecord(step=0, when="before", metrics={"reward": 0.54}),
        EvaluationRecord(step=60, when="after", metrics={"reward": 0.93, "majority_baseline": 0.1}),
    ]
    failures = [
        {"server": "server 0", "reason": "killed", "recovery_s": 12.34},
        {"server": "server 1", "reason": "hung\x1b[2J", "recovery_s": None},
    ]
    summary = {"wall_s": 75.0, "model": "runs/x/model", "server_failures": failures, "ledger_closed": True}
    text = _summary(metrics=metrics, evaluations=results, summary=summary, engine="embedded")
    for part in (
        "finished after 60 steps", "60 (1:15, 1.25 s per step)", "0.02 → 0.59", "a 0.5 → 0.5",
        "0.54 → 0.93 (always the most frequent answer: 0.1)", "1,234 (generated by embedded; 987 trained)",
        "12% (servers idle 30%)", "0.75 (mean, in steps; at most 1)", "100 (90 trained, 6 filtered, 4 cancelled, balanced)",
        "2 failures (recovered after 12.3 s; not recovered: server 1 (hung))", "runs/x/model",
        "grpo-async inspect-rollouts runs/x",
    ):  # fmt: skip
        assert part in " ".join(text.split()), text
    assert "--resume" not in text
    assert "NOT BALANCED" in _summary(metrics=metrics, summary={"ledger_closed": False})


def test_one_step_is_one_and_the_commands_after_a_run_can_be_pasted() -> None:
    text = _summary(Path("my runs/x"), metrics=[{"step": 1.0}], status="stopped")
    assert "stopped after 1 step\n" in text
    assert "grpo-async inspect-rollouts 'my runs/x' " in text
    assert "grpo-async train 'my runs/x/config.yaml' --resume latest" in text
