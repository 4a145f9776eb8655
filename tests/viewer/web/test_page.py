"""The page in a real browser: what a person does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from grpo_async.findings.study import STUDY_FILE, StudyPlan
from grpo_async.records import Origin, TaggedMessage
from grpo_async.run_directory import RunDir
from grpo_async.store import RolloutStore
from tests.support.browser import watch, watched_page
from tests.viewer.support import evaluation, steps, write_run
from tests.viewer.web.pages import go, look_for_news, opened, rows, search
from tests.viewer.web.serving import (
    Inspector,
    append_group,
    append_steps,
    serving,
    tool_rollout,
    write_stored_run,
)

if TYPE_CHECKING:
    from playwright.sync_api import Browser


# -- open


def test_the_token_leaves_the_address_and_opens_further_tabs(browser: Browser, inspector: Inspector) -> None:
    with opened(browser, inspector) as watched:
        page = watched.page
        assert "token" not in page.url
        assert rows(page)[:3] == ["11", "10", "9"]
        assert page.evaluate("document.cookie") == ""
        other = page.context.new_page()
        watch(watched, other)
        other.goto(f"{inspector.origin}/#/rollout?run=one&id=g2-r1")
        other.wait_for_selector("text=Rollout g2-r1")


def test_without_the_token_the_page_asks_for_it_also_when_the_server_was_started_anew(
    browser: Browser, inspector: Inspector
) -> None:
    with watched_page(browser, origin=inspector.origin) as watched:
        page = watched.page
        page.goto(f"{inspector.origin}/#/groups")
        page.fill("#token", "wrong%")
        with page.expect_navigation():
            page.press("#token", "Enter")
        page.fill("#token", inspector.url)  # as it was printed
        page.press("#token", "Enter")
        page.wait_for_selector(".run-status:has-text('48 rollouts')")
        page.evaluate("localStorage.clear()")  # as if the server were another
        look_for_news(page)
        page.wait_for_selector("#token")
        assert all("401" in error for error in watched.errors)
        assert (watched.dialogs, watched.outside) == ([], [])


# -- find


def test_a_query_filters_and_has_an_address(browser: Browser, inspector: Inspector) -> None:
    with opened(browser, inspector, "#/rollouts?run=one") as watched:
        page = watched.page
        search(page, "reward=1 and step<=2")
        page.wait_for_selector("text=9 rollouts in 6 groups")
        found = rows(page)
        assert len(found) == 9
        page.reload()
        page.wait_for_selector("text=9 rollouts in 6 groups")
        assert rows(page) == found
        page.go_back()
        page.wait_for_selector("text=48 rollouts in 12 groups")


def test_a_long_table_is_fetched_by_pages_in_its_order(browser: Browser, inspector: Inspector) -> None:
    with opened(browser, inspector, "#/rollouts?run=long&sort=seq,index") as watched:
        page = watched.page
        assert len(rows(page)) == 100
        while page.locator("button:has-text('Show more')").is_visible():
            before = page.locator(".rows tbody tr").count()
            page.click("button:has-text('Show more')")
            page.wait_for_function(f"() => document.querySelectorAll('.rows tbody tr').length > {before}")
        assert rows(page) == [f"g{group}-r{index}" for group in range(150) for index in range(4)]


# -- one rollout


def test_a_token_shows_all_its_values_on_hover_and_by_keyboard(browser: Browser, inspector: Inspector) -> None:
    with opened(browser, inspector, "#/rollout?run=one&id=g3-r0&show=tokens") as watched:
        page = watched.page
        page.locator("[data-token='0']").hover()
        values = dict(zip(*(page.locator(f".tip {tag}").all_inner_texts() for tag in ("dt", "dd")), strict=True))
        assert [values[name] for name in ("id", "policy version", "advantage", "flags")] == ["5", "1", "0.5000", "none"]
        assert values["position"] == "1 of 3"
        assert (values["sampler logprob"], values["trainer logprob"]) == ("−0.2500", "−1")
        assert values["sampler probability"] == "0.7788"  # e^-0.25
        assert values["log ratio, trainer − sampler"] == "−0.7500"
        page.locator("[data-token='0']").focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(".tip:visible")
        assert page.locator(".tip dd").first.inner_text() == "6"


# -- live


def test_new_rows_are_told_and_move_nothing_until_asked(browser: Browser, tmp_path: Path) -> None:
    root = write_stored_run(tmp_path / "live", num_steps=2)
    with (
        serving(root) as inspector,
        RolloutStore(RunDir(root).rollouts) as store,
        opened(browser, inspector, "#/groups?run=live") as watched,
    ):
        page = watched.page
        before = rows(page)
        append_steps(store, [3], first=50)
        look_for_news(page)
        page.wait_for_selector("text=3 new groups")
        assert rows(page) == before
        page.keyboard.press("r")
        page.wait_for_selector("text=36 rollouts in 9 groups")
        assert rows(page)[:4] == ["52", "51", "50", "5"]


# -- the run itself


def write_metrics(root: Path, *rewards: float, first: int = 1) -> None:
    """One more line of metrics for each."""
    with RunDir(root).metrics.open("a", encoding="utf-8") as file:
        for step, reward in enumerate(rewards, first):
            row = {"step": step, "reward": reward, "entropy": 1 / step, "own": 2}
            file.write(json.dumps(row) + "\n")


def test_curves_grow_with_the_run_and_are_found_by_their_metrics(browser: Browser, tmp_path: Path) -> None:
    root = write_stored_run(tmp_path / "run", num_steps=1)
    write_metrics(root, 0.1, 0.2)

    with serving(root) as inspector, opened(browser, inspector) as watched:
        page = watched.page
        go(page, "#/curves?run=run")
        page.wait_for_selector(".curves .chart canvas")
        assert page.locator(".curves .chart-title").all_inner_texts()[0] == "Reward"
        write_metrics(root, 0.875, first=3)
        look_for_news(page)
        page.wait_for_selector(".curves .chart-legend:has-text('0.875')")
        go(page, "#/curves?run=run&find=own")
        assert page.locator(".curves .chart-title").all_inner_texts() == ["own"]


# -- all runs, and one as a whole


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inspector]:
    """`good` and `flat` below one folder; `good` was evaluated before and after."""
    folder = tmp_path_factory.mktemp("learned")
    evaluations = [evaluation(0, 0.1), evaluation(20, 0.9)]
    groups = [{"rewards": [0.0, 1.0], "step": 1}]
    write_run(folder, "good", metrics=steps(20), evaluations=evaluations, groups=groups)
    write_run(folder, "flat", metrics=steps(20, first=0.0, last=0.0, frac_reward_zero_std=1.0, reward_max=0.0))
    with serving(folder=folder / "runs") as running:
        yield running


def test_a_study_is_a_table_above_its_runs_and_forks_are_a_family(browser: Browser, tmp_path: Path) -> None:
    settings: list[tuple[list[str], list[str]]] = [(["small"], []), (["large"], [])]
    plan = StudyPlan(config="c.yaml", base={}, axes=["lr"], settings=settings, own=None, seeds=[0], tolerance=0.05)
    write_run(tmp_path, "small_seed-0", metrics=steps(20))
    held_out = [evaluation(0, 0.125), evaluation(20, 0.875)]
    write_run(tmp_path, "large_seed-0", metrics=steps(20), evaluations=held_out, config={"loss": {"type": "cispo"}})
    folder = tmp_path / "runs"
    (folder / STUDY_FILE).write_text(plan.model_dump_json())
    RunDir(folder / "large_seed-0").fork.write_text(json.dumps({"parent": str(folder / "small_seed-0"), "step": 10}))
    with serving(folder=folder) as inspector, opened(browser, inspector, "#/home") as watched:
        page = watched.page
        assert page.locator("table[aria-label=Study] tbody tr td:first-child").all_inner_texts() == ["small", "large"]
        assert page.locator("article").count() == 2
        go(page, "#/run?run=large_seed-0")
        family = page.locator("ul[aria-label=Family]")
        family.locator("text=loss.type dapo → cispo").wait_for()
        parent, fork = family.inner_text().split("\n")
        assert (parent, fork.split(", ")[-1]) == ("small_seed-0", "held out 0.875")
        assert fork.startswith("large_seed-0, from step 10: loss.type dapo → cispo")


def test_a_run_is_shown_as_a_whole_and_runs_are_laid_over_each_other(browser: Browser, learned: Inspector) -> None:
    with opened(browser, learned, "#/run?run=flat") as watched:
        page = watched.page
        assert page.get_attribute(".verdict", "data-verdict") == "zero-variance"
        page.wait_for_selector(".overview .uplot")
        page.emulate_media(media="print")  # the paper is narrower than the window
        narrow = "each => (each.style.width = '200px', each.querySelector('canvas').getBoundingClientRect().width)"
        assert page.locator(".chart-plot").first.evaluate(narrow) == 200
        page.emulate_media(media="screen")
        page.click(".findings >> text=See the rollouts >> nth=0")
        page.wait_for_function("() => location.hash.includes('group_std')")
        page.keyboard.press("h")
        page.check("[aria-label='compare good']")
        page.check("[aria-label='compare flat']")
        page.click("text=Curves of 2 runs")
        page.wait_for_selector(".curves .chart-legend:has-text('good'):has-text('flat')")
        go(page, "#/config?run=good&with=flat")
        page.fill("[aria-label='Find a setting']", "max_steps")
        assert "20" in page.inner_text("tbody tr:has-text('training.max_steps')")
        go(page, "#/run?run=good")
        with page.expect_download() as downloading:
            page.click("button:has-text('Report')")
        assert downloading.value.suggested_filename == "good.html"
        assert b'id="report"' in downloading.value.path().read_bytes()


# -- traces


def test_a_trace_has_each_call_once_with_its_result_and_what_is_chosen_is_remembered(
    browser: Browser, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    asked = [TaggedMessage(role="user", content="how long is the river?", origin=Origin.ENVIRONMENT)]
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    done = tool_rollout("g0-r0", "add")
    first, last = done.turns
    said = [
        TaggedMessage(role="assistant", content="", origin=Origin.POLICY, tool_calls=[call, {"id": "c2"}]),
        TaggedMessage(role="tool", content="it is three", origin=Origin.TOOL, name="add", tool_call_id="c1"),
    ]
    record = replace(first.tool_calls[0], result="it is three", failed=False)
    turns = [replace(first, messages=said, tool_calls=[record]), last]
    with RolloutStore(RunDir(root).rollouts) as store:
        append_group(store, 0, "", [replace(done, turns=turns, prompt_messages=asked)], [1.0], step=1)
    with serving(root) as inspector, opened(browser, inspector, "#/groups?run=run") as watched:
        page = watched.page
        page.wait_for_selector(".rows tbody tr:has-text('how long is the river?')")
        go(page, "#/rollouts?run=run")
        page.wait_for_selector(".rows tbody tr:has-text('add(')")
        assert "it is three" not in page.inner_text(".rows tbody tr")
        go(page, "#/rollout?run=run&id=g0-r0")
        main = page.inner_text("main")
        assert main.count("it is three") == 1
        assert page.locator(".message-policy .tool[open] .tool-body:has-text('it is three')").count() == 1
        assert '{"id":"c2"}' in main
        page.click("button:has-text('Tokens')")
        page.locator("[data-token='2']").hover()  # the tool's first token
        assert "no: template, tool or environment" in page.locator(".tip").inner_text()
        assert page.input_value("#color") == "log_ratio"
        page.select_option("#color", "entropy")
        go(page, "#/groups?run=run")
        go(page, "#/rollout?run=run&id=g0-r0")
        assert page.input_value("#color") == "entropy"
