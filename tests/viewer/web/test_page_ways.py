"""The page in a real browser: filters that are put together, keys, and what the address says first."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.rundir import RunDir
from grpo_async.store import RolloutStore
from grpo_async.viewer.web.api import Opening
from tests.support.browser import watched_page
from tests.viewer.web.pages import go, look_for_news, opened, rows
from tests.viewer.web.serving import (
    append_group,
    append_steps,
    serving,
    tool_rollout,
    write_run,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Browser, Page

    Show = Callable[[str], Page]

TERMS = [
    ("", "reward=1", "reward=1"),
    ("truncated", "reward=1", "truncated and reward=1"),
    ("truncated or failed", "reward=1", "(truncated or failed) and reward=1"),
    ("truncated OR failed", "reward=1", "(truncated OR failed) and reward=1"),
    ("(reward<0.2) or (truncated)", "reward=1", "((reward<0.2) or (truncated)) and reward=1"),
    ("(truncated or failed)", "reward=1", "(truncated or failed) and reward=1"),
    ("(truncated or failed) and reward=1", "reward=0", "(truncated or failed) and reward=0"),
    ("truncated or failed and reward=1", "reward=0", "(truncated or failed and reward=1) and reward=0"),
    ("(truncated and reward=1)", "reward=0", "(truncated and reward=1) and reward=0"),
    ("text ilike 'this or that'", "reward=1", "text ilike 'this or that' and reward=1"),
    ("id = 'x and reward=1'", "reward=0", "id = 'x and reward=1' and reward=0"),
    ("stale and reward>=0 and reward<0.5", "reward=1", "stale and reward=1"),
]


def test_a_click_in_a_chart_narrows_what_was_asked_for(show: Show) -> None:
    page = show("#/groups?run=one")
    call = "async ([q, term]) => (await import('/static/web/query_box.js')).withTerm(q, 'reward', term)"
    found = [page.evaluate(call, [query, term]) for query, term, _ in TERMS]
    assert found == [wanted for _, _, wanted in TERMS]


def test_the_keys_of_the_tabs_keep_the_filter_as_the_tabs_do(show: Show) -> None:
    page = show("#/groups?run=one&q=step%3D2")
    page.keyboard.press("2")
    page.wait_for_selector("text=12 rollouts in 3 groups")
    assert page.input_value("#query") == "step=2"
    page.keyboard.press("1")
    page.wait_for_selector("[aria-label=Groups]")
    assert page.input_value("#query") == "step=2"


def test_the_row_that_the_keys_choose_is_told_to_screen_readers(show: Show) -> None:
    page = show("#/groups?run=one")
    page.keyboard.press("j")
    page.keyboard.press("j")
    assert page.evaluate("document.activeElement.getAttribute('role')") == "grid"
    chosen = page.evaluate("document.activeElement.getAttribute('aria-activedescendant')")
    assert page.get_attribute(f"#{chosen}", "aria-selected") == "true"
    assert page.locator(f"#{chosen} [role=gridcell]").count() > 3
    assert page.locator("[role=row][aria-selected=true]").count() == 1


def test_the_arrow_key_goes_on_into_tokens_that_are_folded(browser: Browser, tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.create()
    with RolloutStore(run.rollouts) as store:
        rollout = tool_rollout("g0-r0", said="x", result="y")
        called = replace(rollout.turns[0], tool_response_ids=list(range(100, 180)))  # more than 60 are folded
        rollout = replace(rollout, turns=[called, *rollout.turns[1:]])
        append_group(store, 0, "prompt", [rollout], [1.0], step=1)
    with serving(run.root) as inspected, opened(browser, inspected, "#/rollout?run=run&id=g0-r0") as watched:
        page = watched.page
        assert not page.locator("[data-token='2']").is_visible()
        page.locator("[data-token='1']").focus()
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.dataset.token") == "2"
        assert page.locator("[data-token='2']").is_visible()


def test_the_command_says_the_first_order_and_whether_with_superseded(browser: Browser, tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", num_steps=2)
    with RolloutStore(RunDir(root).rollouts) as store:
        store.supersede_from(3, step=1)
        append_steps(store, [2], first=6)
    opening = Opening(query="reward=0", sort="id", superseded=True)
    with serving(root, opening=opening) as inspected, opened(browser, inspected) as watched:
        page = watched.page
        page.wait_for_selector("text=21 rollouts in 9 groups")
        assert rows(page) == [str(group) for group in range(9)]


def test_a_page_of_the_start_before_asks_for_the_token_of_this_one(browser: Browser, tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", num_steps=1)
    with serving(root) as first, watched_page(browser, origin=first.origin) as watched:
        page = watched.page
        page.goto(first.url)
        page.wait_for_selector(".pulse:has-text('12 rollouts')")
        page.context.clear_cookies()  # as if the server were another
        look_for_news(page)
        page.wait_for_selector("#token")
        page.fill("#token", first.url)
        page.press("#token", "Enter")
        page.wait_for_selector(".grid-row a")


def test_the_timeline_says_who_waited_for_whom_in_its_window(browser: Browser, tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", num_steps=1)
    spans = [("step", "trainer", 0, 100), ("wait for samples", "trainer", 0, 40), ("train", "trainer", 40, 100)]
    lines = [
        json.dumps({"name": name, "lane": lane, "start": 1000 + start, "end": 1000 + end, "details": {}})
        for name, lane, start, end in [*spans, ("generate", "rollout/0", 0, 50)]
    ]
    RunDir(root).events.write_text("\n".join([*lines, ""]), encoding="utf-8")
    with serving(root) as inspected, opened(browser, inspected, "#/timeline?run=run") as watched:
        page = watched.page
        page.wait_for_selector(".waits summary:has-text('the trainer 40% of the time')")
        page.click(".waits summary")
        assert "while requests were generated" in page.inner_text(".waits table")
        go(page, "#/timeline?run=run&from=40&to=100")
        page.wait_for_selector(".waits summary:has-text('the trainer 0% of the time')")


def test_axes_of_steps_have_whole_numbers_and_zeros_no_negative_room(browser: Browser, tmp_path: Path) -> None:
    root = write_run(tmp_path / "run", num_steps=1)
    lines = [f'{{"step": {step}, "completions/clipped_ratio": 0.0}}\n' for step in (1, 2, 3)]
    RunDir(root).metrics.write_text("".join(lines), encoding="utf-8")
    record = """() => {
      const draw = CanvasRenderingContext2D.prototype.fillText;
      window.drawn = [];
      CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
        window.drawn.push(text);
        return draw.call(this, text, ...rest);
      };
    }"""
    with serving(root) as inspected, opened(browser, inspected) as watched:
        page = watched.page
        page.evaluate(record)
        go(page, "#/curves?run=run")
        page.wait_for_selector(".curves .chart canvas")
        page.wait_for_function("() => window.drawn.includes('100%')")
        drawn = page.evaluate("window.drawn")
        assert not [text for text in drawn if text.startswith(("-", "−"))]
        steps = {text for text in drawn if "%" not in text}
        assert {"1", "2", "3"} <= steps
        assert [text for text in steps if not text.isdecimal()] == []
