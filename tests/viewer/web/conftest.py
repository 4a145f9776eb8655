"""The runs that the tests of the page look at, and the tab that they look with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

from tests.support.browser import WatchedPage
from tests.viewer.web.pages import opened, ready
from tests.viewer.web.serving import Inspector, serving, write_hostile_run, write_stored_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


@pytest.fixture(scope="package")
def inspected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Inspector]:
    """`one` and `two`: 4 steps, the same prompts, other words; `long`: 30 steps; `hostile`."""
    folder = tmp_path_factory.mktemp("runs")
    runs = (
        write_stored_run(folder / "one"),
        write_stored_run(folder / "two", word="banana"),
        write_stored_run(folder / "long", num_steps=30, groups_a_step=5),
        write_hostile_run(folder / "hostile"),
    )
    with serving(*runs) as running:
        yield running


@pytest.fixture(scope="module")
def tab(browser: Browser, inspected: Inspector) -> Iterator[WatchedPage]:
    """One tab for the tests of a module."""
    with opened(browser, inspected) as watched:
        yield watched


@pytest.fixture
def show(tab: WatchedPage, inspected: Inspector) -> Iterator[Callable[[str], Page]]:
    """Loads the page anew with a view; at the end of the test nothing may have gone wrong in it."""

    def load(view: str) -> Page:
        tab.page.goto("about:blank")
        tab.page.goto(f"{inspected.origin}/{view}")
        ready(tab.page)
        return tab.page

    for notes in (tab.errors, tab.dialogs, tab.outside):
        notes.clear()  # of a test that failed
    yield load
    tab.assert_quiet()
