"""The dashboard: everything that matters at 80 x 24, never more than the terminal has, and no text that escapes from it."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from grpo_async.display.dashboard import Chart, columns, dashboard
from grpo_async.display.progress import Checkpoints, Example, LastPush, Progress, run_rows
from grpo_async.findings import Finding, Severity, Verdict
from tests.display.support import METRICS

NOW = 2_000_000_000.0
STEP = {
    **METRICS, "sync/push_s": 0.2, "checkpoint/staged_s": 0.1, "ledger/groups/queued": 13.0, "entropy": 0.3,
    "perf/generated_tokens_per_s": 123456.0, "completions/mean_length": 512.0, "async/staleness_max": 3.0,
    "async/staleness/0": 0.5, "async/staleness/1": 0.25, "async/staleness/2": 0.125, "async/staleness/3": 0.125,
    **{f"ledger/groups/{state}": 1000.0 for state in ("trained", "filtered", "stale", "failed", "cancelled")},
}  # fmt: skip


ROWS = [{**STEP, "reward": 0.1 + 0.04 * step} for step in range(1, 13)]


def _server(index: int, **changes: Any) -> dict[str, Any]:
    fields = {"url": f"http://10.0.0.{index}:8000", "state": "serving", "version": 12, "running": 60, "waiting": 3}
    return {"index": index, **fields, "max_running": 128, "kv_usage": 0.38, "restarts": 0, **changes}


def _progress(num_servers: int = 2) -> Progress:
    progress = Progress(max_steps=60)
    progress.phase = "training"
    for step, row in enumerate(ROWS, start=1):
        progress.add_step(step, 60, row)
    down = _server(1, state="down", reason="killed by SIGKILL", restarts=1, running=None, kv_usage=None)
    progress.set_servers([_server(index) if index != 1 else down for index in range(num_servers)])
    progress.push = LastPush(at=NOW - 4, seconds=0.2, step=12, num_bytes=3.1e9, bytes_per_s=1.5e9)
    progress.checkpoints = Checkpoints(step=10, at=NOW - 75, writing=20)
    wrong = {"reward": 0.0, "text": "8, since " + "I think " * 60 + "so it is 8"}
    progress.example = Example.of(
        {"step": 10, "prompt": "3 + 4 =", "completions": [{"reward": 1.0, "text": "it is\n7"}, wrong]}
    )
    progress.evaluations = {"before": {"reward": 0.3}, "step 10": {"reward": 0.456}}
    text = "trainer idle 41%, server KV 38%: raise rollout.max_in_flight 64 -> 96, or move one GPU to a server"
    rose = "Yes: the reward on held-out prompts rose from 0.3 to 0.456: +0.156 (95 %: +0.100 to +0.212; 100 prompts)."
    progress.verdict = Verdict(is_learning=True, key="learns", text=rose, numbers={"change": 0.156})
    progress.advice = Finding(key="generation", severity=Severity.NOTE, title="", text=text)
    progress.add_message("the inference server 1 was killed by SIGKILL; restart 1 of 3 in 1 s", is_warning=True)
    progress.add_message("node 1 is here")
    for message in list(progress.messages):
        progress.messages.popleft()
        progress.messages.append(replace(message, at=NOW - 3))
    return progress


def _text(progress: Progress, width: int, height: int) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None)
    rows = ROWS[: progress.step]
    footer = "logs: runs/x/logs/latest"
    picture = dashboard(progress, rows, run_name="x", footer=footer, width=width, height=height, now=NOW)
    console.print(picture)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n")


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60), (40, 10), (20, 5), (80, 14), (300, 100)])
@pytest.mark.parametrize("num_servers", [0, 1, 12])
def test_it_has_exactly_the_size_of_the_terminal(width: int, height: int, num_servers: int) -> None:
    for progress in (_progress(num_servers), Progress(max_steps=0)):
        lines = _text(progress, width, height).splitlines()
        assert [len(line) for line in lines] == [width] * height


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_everything_that_matters_is_there(width: int, height: int) -> None:
    text = _text(_progress(), width, height)
    for part in (
        *("x · training", "step 12/60", "20%", "1:36 left", "2.0 s/step"),  # 48 steps x 2 s = 96 s
        *("reward  0.580 (all groups)", "average 0.500", "std 0.250", "change +0.120"),  # 0.58 - mean of 0.38 .. 0.54
        *("generated 123456", "trained 987"),
        *(
            "trainer idle 12% train 72% push 10% save 5%  servers idle 30%",
            "best       1.000  it is 7",
            "worst      0.000  8, since",
        ),
        *("13 groups", "16 in flight", "staleness mean 0.75  max 3  0: 50%"),
        *("1 of 2 serve  1 restart", "0 10.0.0.0:8000  serving", "v12", "run 60/128  wait 3", "38%"),
        *("1 10.0.0.1:8000  down", "restarts 1  killed by SIGKILL"),
        *("trained 1000", "filtered 1000", "stale 1000", "failed 1000", "cancelled 1000"),
        *("4 s ago  took 0.20 s  2.9 GiB  1.4 GiB/s  step 12", "step 10, 1:15 ago  writing step 20"),
        "learning   +0.156  Yes: the reward on held-out prompts rose",
        *("before 0.300  step 10 0.456", "raise rollout.max_in_flight 64", "96, or move one GPU"),
        *("the inference server 1 was killed by", "logs: runs/x/logs/latest"),
    ):
        assert part in text, f"{part!r} is missing:\n{text}"
    assert "…" in next(line for line in text.splitlines() if "worst" in line), "the middle is left out"
    assert "so it is 8" in text
    assert ("3 + 4 = (step 10)" in text) is (height > 24), "the prompt gives way first"
    assert any("\u2800" < character <= "\u28ff" for character in text), "a curve of braille dots"
    names = [name for name, _, _ in run_rows(_progress(), NOW, width=width)]
    assert max(map(len, names)) == 10, "texts begin where the number of lines that they take is counted from"


def test_a_larger_terminal_shows_more_charts_more_servers_and_messages() -> None:
    progress = _progress(12)
    small, large, huge = (_text(progress, *size) for size in ((80, 24), (120, 40), (200, 60)))
    assert "and 11 more: 11 serving, 660 requests running, 33 waiting" in small
    assert "1 10.0.0.1:8000  down" in small, "the one in trouble goes first"
    assert "generated tokens/s" not in small
    assert "generated tokens/s  123,456" in large
    assert "completion length  512" not in large
    for part in ("completion length  512", "8 10.0.0.8:8000", "messages", "node 1 is here"):
        assert part in huge


def test_nothing_is_said_of_the_number_of_steps_before_it_is_known() -> None:
    """A run that was resumed at step 5, with `training.epochs`: the trainer counts the rows."""
    for width, height in ((80, 24), (40, 10), (19, 4)):
        text = _text(Progress(max_steps=0, step=5), width, height)
        assert "step 5" in text
        for part in ("5/", "%", "━"):
            assert part not in text, f"{part!r} of a number that is not known:\n{text}"


def test_a_small_terminal_keeps_the_reward_and_what_is_said() -> None:
    text = _text(_progress(), 40, 10)
    for part in ("reward 0.580", "step 12/60", "advice", "warning"):
        assert part in text


@pytest.mark.parametrize(("width", "height"), [(80, 24), (40, 10), (10, 3), (160, 50)])
def test_hostile_text_stays_inside_the_frame(width: int, height: int) -> None:
    progress = _progress(1)
    bad = "a\x1b]0;x\x07b\x1b[2Jc\rd\n\u202ee" + "w" * 500
    progress.phase = bad
    progress.set_servers([_server(0, state="down", url=bad, reason=bad, kv_usage=float("nan"))])
    progress.add_message(bad, is_warning=True)
    progress.evaluations = {bad: {"reward": 1.0}}
    progress.example = Example.of({"step": 1, "prompt": bad, "completions": [{"reward": 0.5, "text": bad}]})
    progress.advice = Finding(key="x", severity=Severity.NOTE, title="", text=bad)
    text = _text(progress, width, height)
    assert max(len(line) for line in text.splitlines()) <= width
    assert not set("\x1b\r\x07\u202e") & set(text)


def test_columns_are_means_or_straight_lines() -> None:
    assert columns([], 3) == []
    assert columns([1.0], 2) == [1.0, 1.0]
    assert columns([0.0, 1.0], 3) == [0.0, 0.5, 1.0]
    assert columns([0.0, 1.0, 2.0, 3.0], 2) == [0.5, 2.5]


def test_a_chart_rises_with_its_values() -> None:
    console = Console(width=30, height=4)
    chart = Chart(points=[step / 99 for step in range(100)], style="", height=4)
    rendered = console.render_lines(chart)
    lines = ["".join(segment.text for segment in line) for line in rendered]
    assert [len(line) for line in lines] == [30] * 4
    assert (lines[0][:10], lines[3][:10]) == ("     0.99┤", "  0.00505┤")
    # 20 columns over 4 rows: the curve leaves the lowest row for the next one after a quarter of the width
    starts = [next(index for index, character in enumerate(line[10:]) if character != " ") for line in lines]
    assert starts == pytest.approx([15, 10, 5, 0], abs=1)
