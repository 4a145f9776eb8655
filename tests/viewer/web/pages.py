"""What the tests of the page do again and again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tests.support.browser import WatchedPage, watched_page
from tests.viewer.web.serving import Inspector

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@contextmanager
def opened(browser: Browser, inspector: Inspector, view: str = "#/groups") -> Iterator[WatchedPage]:
    """A page that has exchanged the token and shows `view`; at the end nothing may have gone wrong in it."""
    with watched_page(browser, origin=inspector.origin) as watched:
        watched.page.goto(inspector.url)
        ready(watched.page)
        go(watched.page, view)
        if view == "#/groups":
            watched.page.wait_for_selector(".rows tbody a")
        yield watched
        watched.assert_quiet()


def go(page: Page, view: str) -> None:
    """Show another view; at the end it is drawn."""
    page.evaluate(
        """view => new Promise(done => {
          if (location.hash === view) return done();
          addEventListener("hashchange", done, { once: true });  // after the page's own listener, which begins to draw
          location.hash = view;
        })""",
        view,
    )
    ready(page)


def look_for_news(page: Page) -> None:
    """Let the page ask at once how much there is by now, as when its tab comes to the front."""
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")


def ready(page: Page) -> None:
    """The view that the address asks for is drawn."""
    page.wait_for_selector("#bar:not(:empty) ~ main:not([aria-busy])")


def rows(page: Page) -> list[str]:
    """The links of the rows, from the top."""
    page.wait_for_selector(".rows tbody a")
    return page.locator(".rows tbody a").all_inner_texts()


def search(page: Page, query: str) -> None:
    page.fill("#query", query)
    page.press("#query", "Enter")
    page.wait_for_function("query => decodeURIComponent(location.hash.replaceAll('+', ' ')).includes(query)", arg=query)
    ready(page)
