"""What the user sees while a run goes and when it has ended."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Literal

import pytest
from rich.console import Console

from grpo_async.checks.report import Check
from grpo_async.display.display import LineDisplay, QuietDisplay
from grpo_async.display.live_display import LiveDisplay
from grpo_async.display.output import Output, OutputMode
from grpo_async.display.progress import Progress, duration
from grpo_async.display.summary import print_summary
from grpo_async.processes.wording import one_line, plain
from grpo_async.rundir import RunDir

METRICS = {
    "reward": 0.53,
    "step_time": 2.0,
    "perf/generated_tokens_per_s": 1234.4,
    "perf/trained_tokens_per_s": 987.0,
    "pipeline/trainer_idle_ratio": 0.125,
    "async/staleness_mean": 0.75,
    "async/staleness_max": 1.0,
    "sync/push_s": 0.04,
    "buffer/queued_groups": 3.0,
    **{f"ledger/groups/{state}": 1000.0 for state in ("trained", "filtered", "stale", "failed", "cancelled", "queued")},
    "ledger/groups/in_flight": 16.0,
}


def _console(*, terminal: bool, width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, height=24, highlight=False, _environ={})


def _text(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def _show(kind: type[LineDisplay | LiveDisplay], console: Console) -> LineDisplay | LiveDisplay:
    return kind(console, run_name="x", max_steps=60, logs=Path("runs/x/logs/latest"))


def test_each_step_is_one_plain_line() -> None:
    console = _console(terminal=False)
    with _show(LineDisplay, console) as display:
        display.phase("training")
        display.step(11, 60, {**METRICS, "reward": 0.51})
        display.step(12, 60, METRICS)
        display.evaluation("after", {"reward": 0.9, "mean_length": 20.0})
    assert _text(console).splitlines() == [
        "logs: runs/x/logs/latest",
        "training",
        # 49 steps x 2 s = 98 s
        "step 11/60  reward 0.510 (all groups)  1234 tok/s generated  987 tok/s trained  staleness 0.75/1  queued 3  in flight 16  "
        "trainer idle 12%  push 0.04 s  2.0 s/step  1:38 left",
        "step 12/60  reward 0.530 (all groups, +0.020)  1234 tok/s generated  987 tok/s trained  staleness 0.75/1  queued 3  "
        "in flight 16  trainer idle 12%  push 0.04 s  2.0 s/step  1:36 left",
        "held-out after training: reward 0.900  mean_length 20.000",
    ]


@pytest.mark.parametrize("terminal", [False, True])
def test_no_text_moves_the_cursor(terminal: bool) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal, no_color=True, color_system=None, width=80)
    display = _show(LiveDisplay if terminal else LineDisplay, console)  # not entered: that writes escapes of its own
    bad = "a\x1b]0;x\x07b\x1b[2Jc\rd"
    display.phase(bad)
    display.note(bad)
    display.evaluation(f"step {bad}", {"mean_length": 1.0})
    display.warning(bad)
    display.server(bad, bad)
    display.servers([{"index": 0, "url": bad, "state": bad, "words": bad}])
    if isinstance(display, LiveDisplay):
        console.print(display.render())
    assert "\x1b" not in _text(console)
    assert "\r" not in _text(console)
    assert _text(console).count("abcd") >= 3


def test_missing_and_undefined_metrics_are_left_out() -> None:
    console = _console(terminal=False)
    with _show(LineDisplay, console) as display:
        display.step(1, 60, {"reward": float("nan"), "sync/push_s": 0.5})
    assert _text(console).splitlines()[1] == "step 1/60  push 0.50 s"


def test_a_terminal_gets_the_dashboard_and_a_pipe_gets_lines(tmp_path: Path) -> None:
    options: dict[str, Any] = {"run_name": "x", "max_steps": 1, "run_dir": RunDir(tmp_path)}
    live, lines = (Output(console=_console(terminal=terminal)).display(**options) for terminal in (True, False))
    assert isinstance(live, LiveDisplay)
    assert isinstance(lines, LineDisplay)
    assert isinstance(Output(console=_console(terminal=True)).display(**options, lines_only=True), LineDisplay)
    quiet = Output(OutputMode.QUIET, _console(terminal=True)).display(**options)
    assert isinstance(quiet, QuietDisplay)


def test_a_quiet_run_tells_of_warnings_only() -> None:
    console = _console(terminal=False)
    with QuietDisplay(console) as display:
        display.phase("training")
        display.step(1, 2, METRICS)
        display.note("the server starts again")
        display.preflight([Check("logprobs", "pass", "fine"), Check("memory", "warn", "little\x1b[2J")])
        display.warning("the server was killed\x1b[2J")
    assert _text(console).splitlines() == ["preflight: warn: memory: little", "warning: the server was killed"]


def test_text_on_one_line_keeps_its_spaces_and_loses_what_turns_a_terminal_around() -> None:
    assert one_line("a  b\n\t c\u202ed\x1b[31me") == "a  b cde"


def test_a_step_line_tells_of_restarts_only_when_there_were_any() -> None:
    console = _console(terminal=False)
    with _show(LineDisplay, console) as display:
        display.step(1, 60, {"servers/serving": 2.0, "servers/restarts": 0.0})
        display.step(2, 60, {"servers/serving": 1.0, "servers/restarts": 3.0})
    assert _text(console).splitlines()[1:] == ["step 1/60", "step 2/60  servers 1  restarts 3"]


@pytest.mark.parametrize("terminal", [False, True])
def test_the_checks_are_a_table_that_is_coloured_on_a_terminal_only(terminal: bool) -> None:
    colors: Literal["standard", "auto"] = "standard" if terminal else "auto"
    console = Console(file=io.StringIO(), force_terminal=terminal, color_system=colors, width=80, _environ={})
    display = _show(LineDisplay, console)
    display.preflight([Check("logprobs", "pass", "mean 1e-6"), Check("a\x1b[2Jb", "fail", "[red]\x1b]0;x\x07no")])
    text = _text(console)
    words = [plain(line).split() for line in text.splitlines()]
    assert ["pass", "logprobs", "mean", "1e-6"] in words
    assert ["fail", "ab", "[red]no"] in words
    assert ("\x1b[32m" in text) == terminal  # green
    assert "\x1b[2J" not in text
    assert "\x1b]" not in text


def test_the_summary_tells_of_servers_in_one_line_only_when_some_failed() -> None:
    failures = [
        {"server": "server 0", "reason": "killed", "recovery_s": 12.34},
        {"server": "server 1", "reason": "hung\x1b[2J", "recovery_s": None},
    ]
    for entries, line in (
        ([], None),
        (failures[:1], "servers 1 failure, recovered after 12.3 s"),
        (failures, "servers 2 failures, recovered after 12.3 s; not recovered: server 1 (hung)"),
    ):
        console = _console(terminal=False, width=200)
        print_summary(console, {"status": "finished", "server_failures": entries}, Path("runs/x"))
        lines = [" ".join(text.split()) for text in _text(console).splitlines() if text.startswith("servers")]
        assert lines == ([] if line is None else [line])


def test_averages_and_changes_are_what_their_formulas_say() -> None:
    progress = Progress(max_steps=10)
    assert progress.reward_average is None
    for step, reward in enumerate([0.4, 0.6, 0.7], start=1):
        progress.add_step(step, 10, {"reward": reward})
    assert progress.reward_change == pytest.approx(0.2)  # 0.7 - (0.4 + 0.6) / 2
    assert progress.reward_average == pytest.approx(1.7 / 3)
    assert (duration(75), duration(3700)) == ("1:15", "1:01:40")


def test_the_summary_says_what_was_reached_and_what_to_do_next() -> None:
    console = _console(terminal=False)
    states = {"trained": 90, "filtered": 6, "stale": 0, "failed": 0, "cancelled": 4, "queued": 0, "in_flight": 0}
    summary = {
        "status": "finished",
        "steps": 60,
        "wall_s": 75.0,
        "model": "runs/x/model",
        "engine": "embedded",
        "reward_first": 0.25,
        "reward_last": 0.9,
        "evaluation": {"before": {"reward": 0.54}, "after": {"reward": 0.93}, "majority_baseline": 0.1},
        "generated_tokens_per_s": 1234.0,
        "trained_tokens_per_s": 987.0,
        "trainer_idle_ratio": 0.12,
        "generator_idle_ratio": 0.3,
        "overlap_efficiency": 0.8,
        "staleness_mean": 0.75,
        "staleness_max": 1,
        "ledger": {"groups": {"started": 100, **states}},
        "ledger_closed": True,
    }
    print_summary(console, summary, Path("runs/x"))
    text = " ".join(_text(console).split())
    for part in (
        "finished after 60 steps in 1:15",
        "0.250 -> 0.900",
        "0.540 before, 0.930 after (always the most frequent answer: 0.100)",
        "1234 generated, 987 trained (embedded engine)",
        "trainer 12%, generator 30%",
        "80% efficiency",
        "mean 0.75, max 1 steps",
        "100 started = 90 trained + 6 filtered + 4 cancelled (closed)",
        "runs/x/model",
        "grpo-async inspect-rollouts runs/x",
    ):
        assert part in text, text
    assert "--resume" not in text
