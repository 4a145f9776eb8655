"""Text of models, data and tools in a real browser: shown, never run; and no view is wider than its window."""

from __future__ import annotations

from typing import TYPE_CHECKING

from grpo_async.utils.safe_text import visible
from tests.support.browser import SIZES, watched_page
from tests.viewer.web.pages import go, opened, ready, search
from tests.viewer.web.serving import HOSTILE, Inspector

if TYPE_CHECKING:
    from playwright.sync_api import Browser


VIEWS = (
    "#/rollout?run=hostile&id=g0-r0&show=tokens",
    "#/rollout?run=hostile&id=g0-r0&show=trace",
    "#/home",
    "#/run?run=hostile",
    "#/change?run=hostile",
    "#/config?run=hostile",
    "#/groups?run=hostile",
    "#/rollouts?run=hostile",
    "#/group?run=hostile&id=0",
    "#/group?run=hostile&id=1",
    "#/rollout?run=hostile&id=g1-r0",
    "#/prompts?run=hostile",
    "#/curves?run=hostile",
    "#/help?run=hostile",
)

_OVER = """() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(Math.max(
    ...[document.documentElement, document.getElementById('main')].map(each => each.scrollWidth - each.clientWidth))))))"""


def test_every_view_shows_what_models_data_and_tools_write_as_text_and_fits_its_window(
    browser: Browser, inspector: Inspector
) -> None:
    with opened(browser, inspector) as watched:
        page = watched.page
        for view in (*VIEWS, "#/groups?run=long", "#/rollouts?run=long", "#/prompts?run=long"):
            go(page, view)
            page.evaluate("document.querySelectorAll('details').forEach(each => { each.open = true })")
            for tag in ("main img", "main script", "main svg:not(.chart svg)", "[onerror]", "[onload]", "main iframe"):
                assert page.locator(tag).count() == 0, f"{view}: {tag}"
            assert "\u202e" not in page.inner_text("main"), view
            for name, (width, height) in SIZES.items():
                page.set_viewport_size({"width": width, "height": height})
                assert page.evaluate(_OVER) <= 0, f"{view} is too wide for a window of size {name}"
        go(page, VIEWS[0])
        shown = page.locator(".tool summary code").inner_text()
        assert shown == visible(HOSTILE)
        go(page, "#/rollouts?run=hostile")
        search(page, "contains(text, '<script>alert')")
        page.wait_for_selector("text=3 rollouts in 2 groups")


def test_the_page_and_the_terminal_make_the_same_characters_visible(browser: Browser, inspector: Inspector) -> None:
    """Control characters, and all marks that change the direction of text (`Bidi_Control` of Unicode)."""
    marks = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
    controls = "".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)]))
    with opened(browser, inspector) as watched:
        call = "async text => (await import('/static/web/dom.js')).visible(text)"
        found = watched.page.evaluate(call, f"a{marks}{controls}é\r\n")
    assert found == visible(f"a{marks}{controls}é\r\n")
    assert not set(found) & set(marks)
    assert set(found) & set(controls) == {"\t", "\n"}


def test_markup_in_the_address_is_text(browser: Browser, inspector: Inspector) -> None:
    with watched_page(browser, origin=inspector.origin) as watched:
        page = watched.page
        page.goto(inspector.url)
        ready(page)
        markup = "%3Cimg%20src=x%20onerror=alert(1)%3E"
        for view in (
            f"rollouts?q={markup}",
            f"rollout?id={markup}",
            f"groups?run={markup}",
        ):
            go(page, f"#/{view}")
            assert page.locator("main img").count() == 0
        assert (watched.dialogs, watched.outside) == ([], [])
        assert [error for error in watched.errors if "40" not in error] == []


def test_the_policy_stops_a_script_that_got_in(browser: Browser, inspector: Inspector) -> None:
    with watched_page(browser, origin=inspector.origin) as watched:
        page = watched.page
        page.goto(inspector.url)
        ready(page)
        page.evaluate("() => { const s = document.createElement('script'); s.id = 'in'; document.body.append(s); }")
        tried = page.evaluate(
            "() => { try { document.body.innerHTML = '<p>'; return 'set' } catch { return 'refused' } }"
        )
        assert tried == "refused"
        assert any("Trusted" in error or "trusted" in error for error in watched.errors)
        assert watched.dialogs == []
