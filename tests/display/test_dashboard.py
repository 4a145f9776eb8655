"""The dashboard: exactly as large as the terminal, with everything that matters at 80 x 24."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from rich.text import Text

from grpo_async.display.charts import bar, chart, meter, short
from grpo_async.display.curve import Curve
from grpo_async.display.dashboard import dashboard
from grpo_async.display.progress import Checkpoints, LastPush, Progress
from grpo_async.findings import Finding, Severity, Verdict

NOW = 2_000_000_000.0
METRICS = {
    "reward": 0.53,
    "reward_std": 0.25,
    "step_time": 2.0,
    "perf/generated_tokens_per_s": 123456.0,
    "perf/trained_tokens_per_s": 98765.0,
    "pipeline/trainer_idle_ratio": 0.125,
    "pipeline/generator_idle_ratio": 0.3,
    "async/staleness_mean": 0.75,
    "async/staleness_max": 3.0,
    "async/staleness/0": 0.5,
    "async/staleness/1": 0.25,
    "async/staleness/2": 0.125,
    "async/staleness/3": 0.125,
    "sync/push_s": 0.2,
    "checkpoint/staged_s": 0.1,
    "buffer/queued_groups": 13.0,
    "entropy": 0.3,
    "completions/mean_length": 512.0,
    **{f"ledger/groups/{state}": 1000.0 for state in ("trained", "filtered", "stale", "failed", "cancelled", "queued")},
    "ledger/groups/in_flight": 16.0,
}
SIZES = [(80, 24), (120, 40), (200, 60), (160, 48), (40, 10), (100, 24), (80, 50)]


def _server(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "index": index,
        "url": f"http://10.0.0.{index}:8000",
        "state": "serving",
        "version": 12,
        "running": 60,
        "waiting": 3,
        "max_running": 128,
        "kv_usage": 0.38,
        "restarts": 0,
        **changes,
    }


def _progress(num_servers: int = 2) -> Progress:
    progress = Progress(max_steps=60)
    progress.phase = "training"
    for step in range(1, 13):
        progress.add_step(step, 60, {**METRICS, "reward": 0.1 + 0.04 * step})
    down = _server(1, state="down", words="killed by SIGKILL", restarts=1, running=None, kv_usage=None)
    progress.set_servers([_server(index) if index != 1 else down for index in range(num_servers)])
    progress.push = LastPush(at=NOW - 4, seconds=0.2, step=12, num_bytes=3.1e9, bytes_per_s=1.5e9)
    progress.checkpoints = Checkpoints(step=10, at=NOW - 75, writing=20)
    progress.evaluations = {"before": {"reward": 0.3}, "step 10": {"reward": 0.456}}
    text = "trainer idle 41%, server KV 38%: raise rollout.max_in_flight 64 -> 96, or move one GPU to a server"
    rose = "Yes: the reward on held-out prompts rose from 0.3 to 0.456: +0.156 (95 %: +0.100 to +0.212; 100 prompts)."
    progress.verdict = Verdict(is_learning=True, key="learns", text=rose)
    progress.advice = Finding(key="generation", severity=Severity.NOTE, what="", text=text)
    progress.add_message("the inference server 1 was killed by SIGKILL; restart 1 of 3 in 1 s", is_warning=True)
    progress.add_message("node 1 is here")
    for message in list(progress.messages):
        progress.messages.popleft()
        progress.messages.append(replace(message, at=NOW - 3))
    return progress


def _lines(progress: Progress, width: int, height: int) -> list[Text]:
    return dashboard(progress, run_name="x", footer="logs: runs/x/logs/latest", width=width, height=height, now=NOW)


def _text(progress: Progress, width: int, height: int) -> str:
    return "\n".join(line.plain for line in _lines(progress, width, height))


@pytest.mark.parametrize(
    ("width", "height"), [*SIZES, (1, 1), (10, 3), (20, 5), (30, 6), (300, 100), (80, 8), (25, 24)]
)
@pytest.mark.parametrize("num_servers", [0, 1, 2, 12])
def test_it_has_exactly_the_size_of_the_terminal(width: int, height: int, num_servers: int) -> None:
    for progress in (_progress(num_servers), Progress(max_steps=60), Progress(max_steps=0)):
        lines = _lines(progress, width, height)
        assert len(lines) == height
        assert {line.cell_len for line in lines} == {width}
        assert not any("\n" in line.plain for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (200, 60)])
def test_everything_that_matters_is_there(width: int, height: int) -> None:
    text = _text(_progress(), width, height)
    for part in (
        *("x · training", "step 12/60", "20%", "1:36 left", "2.0 s/step"),  # 48 steps x 2 s = 96 s
        *("reward  0.580 (all groups)", "average 0.500", "std 0.250", "change +0.120"),  # 0.58 - mean of 0.38 .. 0.54
        *("generated 123456", "trained 98765"),
        # push 0.2 of 2 s, checkpoint 0.1 of 2 s, idle 12.5 %: 100 - 12.5 - 10 - 5 = 72.5
        *("idle 12% train 72% push 10% save 5%", "idle 30%  generate 70%"),
        *("13 groups", "16 in flight", "mean 0.75  max 3", "50%", "25%"),
        *("1 of 2 serve  1 restart", "0 10.0.0.0:8000  serving", "v12", "run 60/128  wait 3", "38%"),
        *("1 10.0.0.1:8000  down", "restarts 1  killed by SIGKILL"),
        *("trained 1000", "filtered 1000", "stale 1000", "failed 1000", "cancelled 1000"),
        *("0:04 ago  took 0.20 s  3.1 GB  1.5 GB/s  step 12", "step 10, 1:15 ago  writing step 20"),
        "learning   Yes: the reward on held-out prompts rose from 0.3",
        *("before 0.300  step 10 0.456", "raise rollout.max_in_flight 64", "96, or move one GPU"),
        *("the inference server 1 was killed by SIGKILL", "logs: runs/x/logs/latest"),
    ):
        assert part in text, f"{part!r} is missing:\n{text}"
    assert any("\u2800" < character <= "\u28ff" for character in text), "a curve of braille dots"


def test_a_larger_terminal_shows_more_charts_more_servers_and_messages() -> None:
    progress = _progress(12)
    small, large, huge = (_text(progress, *size) for size in ((80, 24), (120, 40), (200, 60)))
    assert "and 11 more: 11 serve, 660 requests run, 33 wait" in small
    assert "1 10.0.0.1:8000  down" in small, "the one in trouble goes first"
    assert "generated tokens/s" not in small
    assert "generated tokens/s  123k" in large
    assert "entropy" not in large
    assert "entropy  0.300" in huge
    assert "11 10.0.0.11:8000" in huge
    assert "messages" in huge
    assert "node 1 is here" in huge


def test_a_small_terminal_keeps_the_reward_and_what_is_said() -> None:
    text = _text(_progress(), 40, 10)
    assert "reward 0.580" in text
    assert "step 12/60" in text
    assert "advice" in text
    assert "warning" in text


def test_old_tokens_beyond_the_room_are_counted_together() -> None:
    text = _text(_progress(), 80, 24)  # ages 0, 1, 2, 3 on three lines
    assert "2+" in text
    assert "25%" in text.split("2+")[1].splitlines()[0], "0.125 + 0.125"


def test_a_run_without_news_says_so_and_a_lost_first_server_is_seen() -> None:
    progress = Progress(max_steps=3)
    assert "no news of the servers yet" in _text(progress, 80, 24)
    assert "no steps yet" in _text(progress, 80, 24)
    progress.set_server("inference server 1", "was killed by SIGKILL\x1b[2J, restart 1 of 3")
    assert "DOWN: the inference server 1 was killed by SIGKILL" in _text(progress, 80, 24)
    progress.set_server("inference server 1", None)
    assert "DOWN" not in _text(progress, 80, 24)


def test_hostile_text_stays_inside_the_frame() -> None:
    progress = _progress(1)
    bad = "a\x1b]0;x\x07b\x1b[2Jc\rd\n\u202ee" + "w" * 500
    progress.phase = bad
    progress.set_servers([_server(0, state="down", url=bad, words=bad)])
    progress.add_message(bad, is_warning=True)
    progress.evaluations = {bad: {"reward": 1.0}}
    progress.advice = Finding(key="x", severity=Severity.NOTE, what="", text=bad)
    for width, height in SIZES:
        lines = _lines(progress, width, height)
        assert {line.cell_len for line in lines} == {width}
        assert not any(set("\x1b\r\n\x07\u202e") & set(line.plain) for line in lines)


def test_strange_words_of_a_trainer_do_no_harm() -> None:
    progress = Progress(max_steps=3)
    strange: list[dict[str, Any]] = [
        {"index": "x"},
        {"index": 0, "running": "many", "kv_usage": float("nan"), "version": float("inf")},
    ]
    progress.set_servers(strange)
    progress.add_step(1, 3, {"reward": float("nan"), "async/staleness/x": 1.0, "async/staleness/2": float("nan")})
    assert [server.index for server in progress.servers] == [0]
    assert progress.staleness_shares() == {}
    assert len(_lines(progress, 80, 24)) == 24


def test_a_curve_merges_neighbours_when_there_are_too_many() -> None:
    curve = Curve(most=4)
    for step in range(1, 11):
        curve.add(step, float(step), 1.0)
    assert curve.steps_per_point == 4
    assert [(point.step, point.value, point.num_steps) for point in curve.points] == [
        (1, 2.5, 4),  # mean of 1, 2, 3, 4
        (5, 6.5, 4),
        (9, 9.5, 2),
    ]
    assert {point.spread for point in curve.points} == {1.0}
    curve.add(11, float("nan"))
    assert curve.points[-1].num_steps == 2


def test_columns_are_means_or_straight_lines() -> None:
    curve = Curve()
    assert curve.columns(3) == []
    for step, value in enumerate([0.0, 1.0]):
        curve.add(step, value)
    assert [value for value, _ in curve.columns(3)] == [0.0, 0.5, 1.0]
    curve.add(2, 2.0)
    curve.add(3, 3.0)
    assert [value for value, _ in curve.columns(2)] == [0.5, 2.5]


def test_a_chart_rises_with_its_values() -> None:
    curve = Curve()
    for step in range(100):
        curve.add(step, step / 99)
    lines = [line.plain for line in chart(curve, 27, 4, style="")]
    assert [len(line) for line in lines] == [27] * 4
    assert lines[0].startswith(" 0.995┤")
    assert lines[3].startswith(" 0.005┤")

    def first_column(line: str) -> int:
        return next(index for index, character in enumerate(line[7:]) if character not in " ░")

    # 20 columns over 4 rows: the curve leaves the lowest row for the next one after a quarter of the width
    assert [first_column(line) for line in lines] == [15, 10, 5, 0]


def test_bars_are_as_long_as_their_share() -> None:
    assert bar(0.5, 4) == "██  "
    assert bar(0.3, 4) == "█▎  "  # 0.3 x 4 x 8 = 9.6 eighths -> 10
    assert (bar(0.0, 2), bar(2.0, 2), bar(float("nan"), 2)) == ("  ", "██", "  ")
    assert meter(0.25, 8) == "━━──────"
    numbers = [0.0, 0.5312, 1.234, 123.45, 1234.5, 123456.0, 1.5e6, 2e13, 0.00001, float("inf")]
    assert [short(number) for number in numbers] == [
        *("0", "0.531", "1.23", "123.5", "1234", "123k", "2M", "20T", "1e-05", "inf")
    ]  # fmt: skip


def test_a_picture_is_cheap() -> None:
    import time

    progress = _progress(8)
    for step in range(13, 2000):
        progress.add_step(step, 2000, METRICS)
    began = time.perf_counter()
    for _ in range(10):
        _lines(progress, 200, 60)
    assert (time.perf_counter() - began) / 10 < 0.25  # measured: 0.01 s; it is drawn once a second
