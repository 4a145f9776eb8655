"""Headless Chromium for tests: finds the browser, opens pages, and notes what a page must never do.

Which browser: the one that the environment variable CHROMIUM names, else chromium, chromium-browser or google-chrome on the
PATH, else playwright's own. Without any, tests that ask for the fixture `browser` (tests/conftest.py) are skipped, or fail where
GRPO_REQUIRE contains "browser".
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Dialog, Page, Request

LIMIT_MS = 30_000.0  # for any one thing that a page is waited for; the machine may be busy
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
_MISSING = (
    "no browser: `apt-get install chromium`, or `python -m playwright install chromium`, or name one by the environment variable "
    "CHROMIUM"
)
SIZES: dict[str, tuple[int, int]] = {"wide": (1280, 800), "narrow": (420, 900)}  # (width, height) in CSS pixels


@contextmanager
def launched() -> Iterator[Browser]:
    """A browser without a window; without any the test is skipped, or fails. Until the end of the block an event loop runs in this
    thread: asyncio.run would fail."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        _give_up("playwright is not installed: pip install playwright")
    with sync_playwright() as playwright:
        names = [named] if (named := os.environ.get("CHROMIUM")) else _NAMES
        executable = next(filter(None, map(shutil.which, names)), playwright.chromium.executable_path)
        if not Path(executable).exists():
            _give_up(_MISSING)
        browser = playwright.chromium.launch(executable_path=executable)
        try:
            yield browser
        finally:
            browser.close()


def _give_up(why: str) -> NoReturn:
    if "browser" in os.environ.get("GRPO_REQUIRE", ""):
        pytest.fail(f"GRPO_REQUIRE asks for a browser: {why}")
    pytest.skip(why)


@dataclass(kw_only=True)
class WatchedPage:
    """A page and what went wrong in it so far.

    `errors`: uncaught exceptions and errors on the console, broken Content-Security-Policy rules among them. `dialogs`: texts of
    alerts, which a test's hostile strings would raise. `outside`: URLs that were asked for and are neither of `origin` nor of a
    file, nor data: or blob:.
    """

    page: Page
    origin: str | None
    errors: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)

    def assert_quiet(self) -> None:
        """Nothing went wrong so far."""
        assert (self.errors, self.dialogs, self.outside) == ([], [], [])


@contextmanager
def watched_page(browser: Browser, *, origin: str | None = None) -> Iterator[WatchedPage]:
    """A page in a fresh context (own cookies, no cache), which is closed at the end. `origin`: "http://127.0.0.1:PORT", whose
    requests are the page's own; None: only files are."""
    context = browser.new_context(viewport={"width": 1280, "height": 800}, reduced_motion="reduce")
    context.set_default_timeout(LIMIT_MS)
    page = context.new_page()
    watched = WatchedPage(page=page, origin=origin)
    watch(watched, page)
    try:
        yield watched
    finally:
        context.close()


def watch(watched: WatchedPage, page: Page) -> None:
    """Note into `watched` what goes wrong in `page`, as well (a tab that was opened by a link)."""

    def on_console(message: ConsoleMessage) -> None:
        if message.type == "error":
            watched.errors.append(message.text)

    def on_dialog(dialog: Dialog) -> None:
        watched.dialogs.append(dialog.message)
        dialog.dismiss()

    def on_request(request: Request) -> None:
        own = ("file:", "data:", "blob:", "about:", *((watched.origin,) if watched.origin else ()))
        if not request.url.startswith(own):
            watched.outside.append(request.url)

    page.on("console", on_console)
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.on("dialog", on_dialog)
    page.on("request", on_request)
