"""Run directories in, one file out: what it has of runs that are whole, killed, old, long, or hostile; and the file in a real
Chromium, without a server and without a network."""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from typer.testing import CliRunner

from grpo_async.cli.app import app
from grpo_async.run_directory import RunDir
from grpo_async.viewer.web.report import write_report
from tests.support.browser import WatchedPage, watched_page
from tests.viewer.support import answers_by_view, answers_of, evaluation, steps, write_run
from tests.viewer.web.pages import go, ready
from tests.viewer.web.serving import write_hostile_run, write_stored_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Route

HOSTILE = "</script><!--<script>alert(1)</script><img src=x onerror=alert(2)>\x1b[31m\u202e"


def _answers(run: RunDir) -> dict[str, Any]:
    return answers_by_view(write_report(run))


# -- what it has


def test_the_report_of_a_run_says_what_happened(tmp_path: Path) -> None:
    run = write_run(
        tmp_path,
        metrics=steps(20),
        evaluations=[evaluation(0, 0.1), evaluation(20, 0.9, majority_baseline=0.2, mean_length=12345.6)],
        groups=[
            {"rewards": [0.0, 1.0], "step": 1},
            {"rewards": [1.0, 1.0], "step": 9},
        ],
        summary={"status": "finished", "wall_s": 125.0, "engine": "embedded"},
    )
    found = _answers(run)
    top = found["run"]
    assert top["outcome"] == "The run finished after 20 of 20 steps, 2:05 of training."
    assert ["held-out reward", "0.1 → 0.9", "always the most frequent answer: 0.2"] in top["statistics"]
    assert "from 0.1 to 0.9: +0.800" in top["verdict"]["text"]
    (table,) = top["tables"]
    assert table["rows"][1][1:] == ["0.9", "0.02", "100", "0.9", "12,346", "0.2"]
    assert [row["reward"] for row in found["rollouts"]["rows"]] == [1.0, 0.0, 1.0, 1.0]
    assert found["rollouts"]["counts"] == {"rollouts": 4, "groups": 2}
    drawn = {plot["name"] for chapter in found["curves"]["chapters"] for plot in chapter["plots"]}
    assert {"reward", "held-out", "staleness-ages", "ledger"} <= drawn


def test_a_replay_is_shown_once_with_what_differs(tmp_path: Path) -> None:
    run = write_run(tmp_path, metrics=steps(4))
    run.replays.mkdir()
    found = {
        "step": 3, "changes": ["loss.type: dapo -> gspo", "loss.delta: null -> (not set)"], "cosine": None,
        "recorded": {"loss": 0.5, "lr": 0.1}, "own": {"loss": 0.5, "lr": 0.1}, "other": {"loss": 0.25, "lr": 0.1},
        "tokens": [["g1-r0", 7, "x", 0.0, -2e-3]],
    }  # fmt: skip
    for name in ("step_3.1.json", "step_3.2.json"):
        (run.replays / name).write_text(json.dumps(found))
    metrics, tokens = _answers(run)["run"]["tables"]
    assert metrics["caption"] == "Step 3 with loss.type: dapo → gspo"
    assert [row[0] for row in metrics["rows"]] == ["loss", "1 more metric: the same in all columns"]
    assert tokens["rows"] == [["g1-r0", "7", "x", "0", "-2.00e-03"]]


def test_a_killed_run_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    run = write_run(tmp_path, metrics=steps(8), groups=[{"rewards": [0.0, 1.0]}], state=None)
    status = {"version": 1, "state": "running", "host": platform.node(), "pid": 2**22 + 1, "pid_started_at": 1.0}
    run.status.write_text(json.dumps(status))
    with run.metrics.open("a") as file:
        file.write('{"step": 9, "rew')
    block = next(run.rollouts.glob("block-*.jsonl"))
    with block.open("a") as file:
        file.write('{"schema": 3, "seq"')
    os.utime(block, (1.0, 1.0))  # what was written just now may still be going on
    found = _answers(run)
    top = found["run"]
    assert "The run was killed after 8 of 8 steps" in top["outcome"]
    assert any("torn" in each for each in top["problems"])
    assert found["rollouts"]["counts"] == {"rollouts": 2, "groups": 1}


@pytest.mark.parametrize("content", ["", "not json\n", '[1, 2]\n"x"\n', '{"step": "a"}\n', "\x00\xff\n"])
def test_files_that_hold_something_else_do_not_break_the_report(tmp_path: Path, content: str) -> None:
    run = write_run(tmp_path, metrics=steps(3))
    for path in (run.metrics, run.evaluation_log, run.summary, run.status, run.config, run.events):
        path.write_text(content, encoding="utf-8")
    assert "It did not train" in _answers(run)["run"]["verdict"]["text"]


def test_the_file_has_no_secrets_names_no_other_address_and_stays_small(tmp_path: Path) -> None:
    reward = {"function": "grpo_async.rewards.text:exact_match", "arguments": {"api_key": "sk-secret"}}
    config = {"rewards": [reward], "tracking": [{"type": "wandb", "project": "hidden-project"}]}
    long = {"rewards": [0.0, 1.0], "answer": "x" * 1_500_000}
    run = write_run(tmp_path, metrics=steps(10_000), config=config, groups=[long] * 4)
    page = write_report(run).read_text(encoding="utf-8")
    for secret in ("sk-secret", "hidden-project"):
        assert secret not in page
    assert not re.findall(r"<(?:link|img|iframe|object|embed|base|form)\b", page[: page.index('id="report"')])
    assert not re.findall(r"<script[^>]*\ssrc=", page)
    assert not re.findall(r"@import|url\(", page)
    answers = answers_of(run.report)
    assert len(page) < 6_000_000, "of rollouts at most 4 MB; eight of them have 1.5 MB each"
    assert len(page) - sum(len(json.dumps(a)) for view, _, a, _ in answers if view == "rollout") < 2_000_000
    curves = next(answer for view, _, answer, _ in answers if view == "curves")
    (reward_plot,) = (plot for plot in curves["chapters"][0]["plots"] if plot["name"] == "reward")
    assert (len(reward_plot["options"]["x"]), reward_plot["options"]["x"][-1]) == (500, 10_000)


def test_the_command_writes_where_it_is_told(tmp_path: Path) -> None:
    run, out = write_run(tmp_path, "a"), tmp_path / "new" / "x.html"
    done = CliRunner().invoke(app, ["report", str(run.root), "--out", str(out)])
    assert (done.exit_code, done.output.strip()) == (0, str(out))
    assert list(tmp_path.glob("**/*.html")) == [out]
    assert out.stat().st_mode & 0o777 == 0o600, "it quotes rollouts, which are as private"


# -- in the browser

_HAS_COLOR = """(canvas, wanted) => {
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    for (let i = 0; i < data.length; i += 4)
        if (data[i + 3] > 250 && Math.hypot(...wanted.map((value, k) => value - data[i + k])) < 12) return true;
    return false;
}"""
LIGHT_BLUE = [0x00, 0x69, 0xB4]  # --series-1


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with everything, among it text that would like to be more than text."""
    folder = tmp_path_factory.mktemp("report")
    metrics = [{**row, f"rewards/{HOSTILE}/mean": 0.5, "rewards/b/mean": 0.01 * row["step"]} for row in steps(40)]
    run = write_run(
        folder,
        "<img src=x onerror=alert(3)>",
        metrics=metrics,
        evaluations=[{**evaluation(0, 0.1), "by_group": {HOSTILE: {"reward": 0.1}}}, evaluation(40, 0.9)],
        error=HOSTILE,
        state="failed",
        config={
            "run": {"name": "x"},
            "data": {"train": {"type": "jsonl", "path": "a.jsonl", "system_prompt": HOSTILE}},
        },
    )
    write_hostile_run(run.root)
    return write_report(run)


@contextmanager
def _opened(browser: Browser, file: Path, *, left: list[str] | None = None) -> Iterator[WatchedPage]:
    """The file, with no way out: a request for anything else that would leave the browser is refused, and noted in `left`. At the
    end nothing may have gone wrong."""
    with watched_page(browser) as watched:

        def only_this(route: Route) -> None:
            if route.request.url.partition("#")[0] == file.as_uri():
                route.continue_()
            else:
                (watched.outside if left is None else left).append(route.request.url)
                route.abort()

        watched.page.route("**/*", only_this)
        watched.page.goto(file.as_uri())
        ready(watched.page)
        yield watched
        watched.assert_quiet()


def test_a_report_opens_as_a_file_and_leads_from_the_verdict_to_the_tokens(browser: Browser, tmp_path: Path) -> None:
    run = RunDir(write_stored_run(tmp_path / "good"))
    evaluations = [evaluation(0, 0.1), evaluation(20, 0.9)]
    write_run(tmp_path / "other", "good", metrics=steps(20, sampling__ess=0.4), evaluations=evaluations)
    for name in ("metrics.jsonl", "evaluations.jsonl", "status.json", "config.yaml"):
        (tmp_path / "other" / "runs" / "good" / name).rename(run.root / name)
    with _opened(browser, write_report(run)) as watched:
        page = watched.page
        assert page.get_attribute(".verdict", "data-verdict") == "learns"
        assert page.locator(".overview .chart-plot canvas").first.evaluate(_HAS_COLOR, LIGHT_BLUE)
        assert page.locator("#bar nav a").all_inner_texts() == ["Overview", "Curves", "Rollouts", "Settings"]
        page.click(".findings li:has-text('Samples are off policy') >> text=See the plot")
        page.wait_for_selector(".curves .chart h3:has-text('Importance ratio')")
        page.click("#bar nav >> text=Curves")
        page.wait_for_selector("h2:has-text('The pipeline')")
        assert page.locator(".curves .chart-plot canvas").count() >= 15
        page.click("#bar nav >> text=Settings")
        page.wait_for_selector("td:has-text('training.max_steps')")
        page.click("#bar nav >> text=Rollouts")
        page.wait_for_selector("text=12 of the best and the worst")
        page.locator(".rows tbody a[href]").last.click()
        page.wait_for_selector("h1:has-text('Rollout')")
        page.click("button:has-text('Tokens')")
        page.locator("[data-token='0']").hover()
        assert "sampler logprob" in page.locator(".tip").inner_text()


def test_text_of_models_data_and_settings_stays_text_in_every_view(browser: Browser, report: Path) -> None:
    name = "%3Cimg+src%3Dx+onerror%3Dalert(3)%3E"
    page = report.read_text(encoding="utf-8")
    assert page.count("</script>") == 4  # uPlot, charts.js, our modules, the data
    assert "<!--" not in page
    views = [f"#/{view}?run={name}" for view in ("run", "curves", "rollouts", "config")]
    for view, asked, *_ in answers_of(report):
        if view in ("rollout", "group"):
            parameters = "&".join(f"{key}={value}" for key, value in asked.items() if key != "run")
            run = name + str(asked["run"]).removeprefix("<img src=x onerror=alert(3)>").replace("@", "%40")
            views.append(f"#/{view}?run={run}&{parameters}")
    assert {view.partition("?")[0] for view in views} >= {"#/rollout", "#/run"}
    with _opened(browser, report) as watched:
        for view in views:
            go(watched.page, view)
            assert "Not found" not in watched.page.inner_text("main"), view
            watched.page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
            for tag in ("main img", "main script", "[onerror]", "[onload]", "main iframe"):
                assert watched.page.locator(tag).count() == 0, f"{view}: {tag}"
            assert not {"\u202e", "\x1b"} & set(watched.page.inner_text("main")), view


def test_a_script_that_somebody_puts_into_the_file_does_not_run(browser: Browser, report: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.html"
    added = (
        "<script>alert(1)</script><img src='https://example.com/x'><link rel=stylesheet href='https://example.com/y'>"
    )
    changed.write_text(report.read_text(encoding="utf-8").replace("<noscript>", f"{added}<noscript>"))
    left: list[str] = []
    with _opened(browser, changed, left=left) as watched:
        assert (watched.dialogs, left) == ([], [])  # the policy stops it inside the browser
        assert sum("Content Security Policy" in error for error in watched.errors) == 3
        for notes in (watched.errors, watched.outside):
            notes.clear()
