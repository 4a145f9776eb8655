"""Run directories in, a page out: what it says of runs that are whole, killed, old, long, or hostile."""

from __future__ import annotations

import json
import os
import platform
import re
import tracemalloc
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from grpo_async.cli.app import app
from grpo_async.errors import ConfigError
from grpo_async.records import GroupStatus
from grpo_async.run_directory import RunDir
from grpo_async.store.files import Metadata, write_metadata
from grpo_async.viewer.report.rollouts import read_rollouts
from grpo_async.viewer.report.run_data import read_run
from grpo_async.viewer.report.sections import waits
from grpo_async.viewer.report.write import write_report
from tests.viewer.report.support import Group, evaluation, steps, write_run, write_store

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e"


def _page(*runs: RunDir, out: Path | None = None) -> str:
    return write_report(runs, out).read_text(encoding="utf-8")


def _data(page: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="report-data">(.*?)</script>', page, re.DOTALL)
    assert found
    content: list[dict[str, Any]] = json.loads(found[1])
    return content


def _text(page: str) -> str:
    """What a reader sees, roughly."""
    body = page[page.index("<main>") : page.index("</main>")]
    return " ".join(unescape(re.sub(r"<[^>]+>", " ", body)).split())


def test_the_report_of_a_run_says_what_happened(tmp_path: Path) -> None:
    run = write_run(
        tmp_path,
        metrics=steps(20),
        evaluations=[evaluation(0, 0.1), evaluation(20, 0.9, majority_baseline=0.2, mean_length=12345.6)],
        groups=[
            Group(rewards=[0.0, 1.0], prompt="first prompt", text="an answer", step=1),
            Group(rewards=[1.0, 1.0], prompt="first prompt", text="a better answer", step=9),
        ],
        summary={"status": "finished", "wall_s": 125.0, "engine": "embedded"},
    )
    page = _page(run)
    text = _text(page)
    assert run.report.is_file()
    assert "The run finished after 20 of 20 steps in 2:05." in text
    assert "0.1 → 0.9 always the most frequent answer: 0.2" in text
    assert "from 0.1 to 0.9: +0.800" in text
    assert "step 0, before training" in text
    assert "step 20 0.9 0.02 100 0.9 12,346 0.2" in text
    for part in ("Most improved prompts", "Reward 0.5 → 1", "a better answer", "Best rollouts"):
        assert part in text
    ids = {chart["id"] for chart in _data(page)}
    assert {"chart-reward", "chart-held-out", "chart-staleness-ages", "chart-ledger"} <= ids
    for each in ids | set(re.findall(r'href="#([^"]+)"', page)):  # also where the findings' links lead
        assert f'id="{each}"' in page


def test_a_held_out_prompt_before_and_after_stands_before_everything_else(tmp_path: Path) -> None:
    run = write_run(tmp_path, metrics=steps(20), groups=[Group(rewards=[0.0, 1.0])])
    assert "Before and after" not in _text(_page(run))

    def evaluate(step: int, why: float, other: float, *more: Group, text: str = "x") -> None:
        asked = Group(rewards=[why], prompt="why?", text=text, step=step, columns={"answer": "so"})
        write_store(run.evaluation(step), [asked, Group(rewards=[other], prompt="else?", text=text, step=step), *more])

    evaluate(0, 0.0, 1.0, text="I guess")
    evaluate(20, 1.0, 0.0, Group(rewards=[1.0], step=20), text="because")  # the third is in one of them only
    text = _text(_page(run))
    assert "2 held-out prompts at step 0 and at step 20: 1 better, 1 worse, 0 unchanged." in text
    first = text.index(
        "Reward 0 → 1 mean of its group, step 0 and step 20 prompt why? answer = so step 0, reward 0 I guess"
    )
    assert text.index("Before and after") < first < text.index("Reward 1 → 0 mean of its group") < text.index("Rewards")
    evaluate(30, 0.0, 1.0)
    assert "0 better, 0 worse, 1 right both times, 1 wrong both times." in _text(_page(run))
    evaluate(40, 0.5, 0.0)
    assert "1 better, 1 worse, 0 unchanged. Reward 1 → 0" in _text(_page(run))  # it fell: what was lost comes first


def test_why_a_run_does_not_learn_stands_there_with_the_command_that_shows_it(tmp_path: Path) -> None:
    metrics = steps(20, first=0.0, last=0.0, frac_reward_zero_std=1.0, reward_max=0.0)
    run = write_run(tmp_path, metrics=metrics, groups=[Group(rewards=[0.0, 0.0])])
    text = _text(_page(run))
    assert "Does it learn? No. All rewards are 0." in text
    assert f"grpo-async inspect-rollouts {run.root} group_std=0 --sort step" in text


def test_two_runs_are_overlaid_and_their_settings_compared(tmp_path: Path) -> None:
    slow = write_run(tmp_path, "slow", metrics=steps(20), evaluations=[evaluation(0, 0.1), evaluation(20, 0.4)])
    for step in (0, 20):
        write_store(slow.evaluation(step), [Group(rewards=[1.0], step=step)])
    fast = write_run(
        tmp_path,
        "fast",
        metrics=steps(12),
        state="stopped",
        config={"optimizer": {"lr": 1e-3}, "training": {"max_steps": 20}},
    )
    out = write_report([slow, fast])
    assert out == tmp_path / "runs" / "report-slow-fast.html"
    page = out.read_text(encoding="utf-8")
    reward = next(chart for chart in _data(page) if chart["id"] == "chart-reward")
    assert [series["label"] for series in reward["series"]] == ["slow", "fast"]
    sections = re.findall(r'<section id="([^"]+)"', page)
    assert sections[:3] == ["rewards", "held-out", "before-after"]
    assert re.findall(r'<li><a href="#([^"]+)"', page) == sections
    text = _text(page)
    assert "slow vs. fast" in text
    assert "Settings that differ setting slow fast optimizer.lr 1e-06 0.001" in text
    assert (
        "rollout.temperature"
        not in page[page.index("Settings that differ") : page.index("</table>", page.index("Settings that differ"))]
    )


def test_a_run_that_failed_before_its_first_step_says_why(tmp_path: Path) -> None:
    run = write_run(tmp_path, state="failed", error="the server of rank 0 ended: CUDA out of memory\n  see logs")
    text = _text(_page(run))
    assert "The run failed after 0 of 5 steps." in text
    assert "CUDA out of memory see logs" in text
    assert "Cannot say. No optimizer step was finished." in text
    for part in ("There are no metrics", "holds no rollouts yet", "There was no evaluation", "There is no timeline"):
        assert part in text


def test_a_value_of_group_by_may_have_any_name(tmp_path: Path) -> None:
    parts = {"by_group": {"all": {"reward": 0.125}}}
    text = _text(_page(write_run(tmp_path, evaluations=[{**evaluation(0, 0.5), **parts}])))
    assert " all 0.125 all prompts 0.5 " in text


def test_an_evaluation_that_failed_is_not_called_none(tmp_path: Path) -> None:
    """Its row in the table says why it has no result."""
    text = _text(_page(write_run(tmp_path, evaluations=[{"step": 0, "when": "before", "error": "the scorer died"}])))
    assert "none: the scorer died" in text
    assert "There was no evaluation" not in text


def test_failed_rollouts_and_those_that_no_step_saw_are_not_called_unscored(tmp_path: Path) -> None:
    groups = [
        Group(rewards=[1.0, None]),
        Group(rewards=[None, None], is_failed=True, status=GroupStatus.FAILED),
        Group(rewards=[None], step=None, status=GroupStatus.CANCELLED),
    ]
    overview = read_rollouts(write_run(tmp_path, groups=groups))
    assert (overview.num_rollouts, overview.num_sampled, overview.num_unscored) == (5, 2, 1)


def test_a_killed_run_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    run = write_run(tmp_path, metrics=steps(8), groups=[Group(rewards=[0.0, 1.0])], state=None)
    status = {"version": 1, "state": "running", "host": platform.node(), "pid": 2**22 + 1, "pid_started_at": 1.0}
    run.status.write_text(json.dumps(status))
    with run.metrics.open("a") as file:
        file.write('{"step": 9, "rew')
    block = next(run.rollouts.glob("block-*.jsonl"))
    with block.open("a") as file:
        file.write('{"schema": 3, "seq"')
    os.utime(block, (1.0, 1.0))  # what was written just now may still be going on
    text = _text(_page(run))
    for part in ("The run was killed after 8 of 8 steps", "torn", "2 rollouts in 1 group."):
        assert part in text


def test_a_run_that_was_stopped_after_its_last_step_says_what_is_left(tmp_path: Path) -> None:
    """The export and the last evaluation come after it."""
    text = _text(_page(write_run(tmp_path, metrics=steps(20), state="stopped")))
    assert "The run was stopped after 20 of 20 steps in 40 s, before its end; --resume does the rest." in text


@pytest.mark.parametrize("state", ["failed", "running"])
def test_the_time_of_an_attempt_before_is_not_told_of_this_one(tmp_path: Path, state: str) -> None:
    left = {"status": "stopped", "steps": 3, "wall_s": 32.0}
    run = write_run(tmp_path, metrics=steps(120), state=state, error="it broke", summary=left)
    text = _text(_page(run))
    assert "120 of 120 steps in 4:00" in text  # 120 x 2 s
    assert "in 32 s" not in text


def _trainer_bound(**more: float) -> list[dict[str, float]]:
    """The trainer works all the time, the servers wait for it 70% of it."""
    return steps(20, pipeline__trainer_idle_ratio=0.05, pipeline__generator_idle_ratio=0.7, **more)


def test_advice_is_of_the_machine_that_the_run_had(tmp_path: Path) -> None:
    """As status.json has it, which is of the last attempt: the summary may be older."""
    for name, on_gpu in (("gpu", True), ("cpu", False)):
        run = write_run(tmp_path, name, metrics=_trainer_bound(), summary={"status": "stopped", "on_gpu": not on_gpu})
        run.status.write_text(json.dumps({"version": 1, "state": "failed", "on_gpu": on_gpu, "engine": "vllm"}))
        text = _text(_page(run))
        assert ("launch.num_trainer_ranks: 1 →" in text) is on_gpu
        assert ("a faster trainer would help" in text) is not on_gpu


def test_advice_stands_there_in_sentences(tmp_path: Path) -> None:
    run = write_run(tmp_path, metrics=_trainer_bound(), summary={"status": "finished", "on_gpu": False})
    text = _text(_page(run))
    assert "Bottleneck: training. Servers idle 70%: training takes" in text
    assert "generation is not the limit." in text


def test_of_a_long_timeline_only_the_newest_steps_are_held(tmp_path: Path) -> None:
    run = write_run(tmp_path, metrics=steps(3))
    generate = [("generate", "rollout/0", place / 20, place / 20 + 0.04, {"turn": 0}) for place in range(20)]
    with run.events.open("w") as file:
        for step in range(1, 1001):
            for name, track, start, end, details in [*generate, ("step", "trainer", 0.0, 1.0, {"step": step})]:
                at = 1000.0 + step
                event = {"name": name, "track": track, "start": at + start, "end": at + end, "details": details}
                file.write(json.dumps(event, separators=(",", ":")) + "\n")
    tracemalloc.start()
    try:
        part = waits(read_run(run, "run"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert part.table is not None
    assert part.steps == "Steps 981 to 1000"
    assert peak < 3e6, "21,000 events take 12 MB and more"


def test_an_old_run_is_read_as_far_as_it_is_understood(tmp_path: Path) -> None:
    run = write_run(tmp_path, metrics=steps(8), state=None, summary={"status": "finished", "steps": 8})
    run.config.write_text("model: {path: m}\nan_old_section: {x: 1}\n")
    (run.rollouts / "store.json").write_text("{]}\n")
    text = _text(_page(run))
    assert "The run finished after 8 steps" in text
    for part in ("config.yaml is of another version", "an_old_section.x", "The rollouts cannot be read"):
        assert part in text


def test_a_damaged_store_of_an_evaluation_hides_nothing_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path, metrics=steps(3), groups=[Group(rewards=[0.0, 1.0])])
    write_metadata(run.rollouts, Metadata(sample_rate=0.5))
    for step in (0, 3):
        write_store(run.evaluation(step), [Group(rewards=[1.0], step=step)])
    (run.evaluation(3) / "store.json").write_text("{]}\n")
    found = read_rollouts(run)
    assert found.num_rollouts == 2
    assert [note.partition(":")[0] for note in found.notes] == [
        "record.rollouts.sample_rate = 0.5 left out some of the groups",
        "The rollouts cannot be read",
    ]


@pytest.mark.parametrize("content", ["", "not json\n", '[1, 2]\n"x"\n', '{"step": "a"}\n', "\x00\xff\n"])
def test_files_that_hold_something_else_do_not_break_the_report(tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path, metrics=steps(3))
    for path in (run.metrics, run.evaluation_log, run.summary, run.status, run.config, run.events):
        path.write_text(content, encoding="utf-8")
    assert "No optimizer step was finished" in _text(_page(run))


def test_text_of_models_data_and_config_stays_text(tmp_path: Path) -> None:
    run = write_run(
        tmp_path,
        metrics=[{**row, f"rewards/{HOSTILE}/mean": 0.5, "rewards/b/mean": 0.1} for row in steps(8)],
        evaluations=[{**evaluation(0, 0.1), "by_group": {HOSTILE: {"reward": 0.1}}}, {"step": 3, "error": HOSTILE}],
        groups=[
            Group(rewards=[0.0, 1.0], prompt=HOSTILE, text=HOSTILE),
            Group(rewards=[None], is_failed=True, status=GroupStatus.FAILED),
        ],
        state="failed",
        error=HOSTILE,
        config={
            "run": {"name": "x"},
            "data": {"train": {"type": "jsonl", "path": "a.jsonl", "system_prompt": HOSTILE}},
        },
    )
    page = _page(run)
    for part in ("<script>alert", "<img", "\x1b", "\u202e"):
        assert part not in page
    assert page.count("</script>") == 4  # the data, uPlot, charts.js, report.js
    assert "&lt;/script&gt;&lt;script&gt;alert(1)" in page


def test_the_page_has_no_secrets_names_no_other_address_and_stays_small(tmp_path: Path) -> None:
    reward = {"function": "grpo_async.rewards.text:exact_match", "arguments": {"api_key": "sk-secret"}}
    config = {"rewards": [reward], "tracking": [{"type": "wandb", "project": "hidden-project"}]}
    page = _page(write_run(tmp_path, metrics=steps(10_000), config=config))
    assert "sk-secret" not in page
    assert "hidden-project" not in page
    assert "default-src 'none'" in unescape(page)
    assert not re.findall(r"<(?:link|img|iframe|object|embed|base|form)\b", page)
    assert not re.findall(r"<script[^>]*\ssrc=", page)
    assert not re.findall(r"@import|url\(", page)
    assert len(page) < 2_000_000
    reward_chart = next(chart for chart in _data(page) if chart["id"] == "chart-reward")
    assert len(reward_chart["x"]) == 500
    assert reward_chart["x"][-1] == 10_000


def test_wrong_runs_and_places_are_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path, metrics=steps(3))
    with pytest.raises(ConfigError, match="named twice"):
        write_report([run, RunDir(run.root / ".." / "run")])
    with pytest.raises(ConfigError, match="9 runs are too many"):
        write_report([RunDir(tmp_path / str(number)) for number in range(9)])
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--out .*file/x.html: "):
        write_report([run], tmp_path / "file" / "x.html")


def test_the_command_writes_where_it_is_told(tmp_path: Path) -> None:
    run, out = write_run(tmp_path, "a"), tmp_path / "new" / "x.html"
    done = CliRunner().invoke(app, ["report", str(run.root), "--out", str(out)])
    assert (done.exit_code, done.output.strip()) == (0, str(out))
    assert list(tmp_path.glob("**/*.html")) == [out]
