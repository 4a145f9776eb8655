"""Text of models, data and tools in a real browser: shown, never run; and no view is wider than its window."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.support.browser import SIZES, watched_page
from tests.viewer.web.pages import opened, ready, search
from tests.viewer.web.serving import HOSTILE, Inspector

if TYPE_CHECKING:
    from playwright.sync_api import Browser


VIEWS = (
    "#/groups?run=hostile",
    "#/rollouts?run=hostile",
    "#/group?run=hostile&id=0",
    "#/group?run=hostile&id=1",
    "#/rollout?run=hostile&id=g0-r0",
    "#/rollout?run=hostile&id=g0-r0&show=messages",
    "#/rollout?run=hostile&id=g1-r0",
    "#/prompts?run=hostile",
    "#/compare?run=hostile&a=hostile:g0-r0&b=hostile:g0-r1",
    "#/curves?run=hostile",
    "#/timeline?run=hostile",
    "#/help?run=hostile",
)


def test_what_models_data_and_tools_write_is_shown_and_never_run(browser: Browser, inspected: Inspector) -> None:
    with opened(browser, inspected) as watched:
        page = watched.page
        for view in VIEWS:
            page.evaluate("hash => { location.hash = hash }", view)
            page.wait_for_function("hash => location.hash.startsWith(hash.split('&color')[0])", arg=view)
            page.wait_for_timeout(150)
            ready(page)
            page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
            for tag in ("main img", "main script", "main svg:not(.chart svg)", "[onerror]", "[onload]", "main iframe"):
                assert page.locator(tag).count() == 0, f"{view}: {tag}"
            assert "\u202e" not in page.inner_text("main"), view
        page.evaluate("hash => { location.hash = hash }", VIEWS[4])
        page.wait_for_selector("h1:has-text('g0-r0')")
        shown = page.locator(".tool summary code").inner_text()
        assert shown == HOSTILE.replace("\x1b", "␛").replace("\x07", "␇").replace("\u202e", "\\u202e")
        search_for = '"<script>alert"'
        page.evaluate("hash => { location.hash = hash }", "#/rollouts?run=hostile")
        page.wait_for_selector("#query")
        search(page, search_for)
        page.wait_for_selector("text=2 rollouts in 1 group")


def test_markup_in_the_address_is_text(browser: Browser, inspected: Inspector) -> None:
    with watched_page(browser, origin=inspected.origin) as watched:
        page = watched.page
        page.goto(inspected.url)
        page.wait_for_selector(".grid-row a")
        markup = "%3Cimg%20src=x%20onerror=alert(1)%3E"
        for view in (
            f"rollouts?q={markup}",
            f"rollout?id={markup}",
            f"compare?a={markup}:1&b=x:2",
            f"groups?run={markup}",
        ):
            page.evaluate("hash => { location.hash = hash }", f"#/{view}")
            page.wait_for_timeout(150)
            ready(page)
            assert page.locator("main img").count() == 0
        assert (watched.dialogs, watched.outside) == ([], [])
        assert [error for error in watched.errors if "40" not in error] == []


def test_the_policy_stops_a_script_that_got_in(browser: Browser, inspected: Inspector) -> None:
    with watched_page(browser, origin=inspected.origin) as watched:
        page = watched.page
        page.goto(inspected.url)
        page.wait_for_selector(".grid-row a")
        page.evaluate("() => { const s = document.createElement('script'); s.id = 'in'; document.body.append(s); }")
        tried = page.evaluate(
            "() => { try { document.body.innerHTML = '<p>'; return 'set' } catch { return 'refused' } }"
        )
        assert tried == "refused"
        assert any("Trusted" in error or "trusted" in error for error in watched.errors)
        assert watched.dialogs == []


# -- every size


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_no_view_is_wider_than_the_window(browser: Browser, inspected: Inspector, size: str) -> None:
    with opened(browser, inspected, size=SIZES[size]) as watched:
        page = watched.page
        for view in (*VIEWS, "#/groups?run=long", "#/rollouts?run=long", "#/prompts?run=long"):
            page.evaluate("hash => { location.hash = hash }", view)
            page.wait_for_timeout(150)
            ready(page)
            over = page.evaluate(
                "[document.documentElement, document.getElementById('main')].map(e => e.scrollWidth - e.clientWidth)"
            )
            assert max(over) <= 0, f"{view} is {max(over)} px too wide"
