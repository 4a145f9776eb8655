"""The report in a real Chromium, opened as a file: it draws, it asks nobody, it follows light, dark, width and paper."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from grpo_async.viewer.report.write import write_report
from tests.support.browser import WatchedPage, watched_page
from tests.viewer.report.support import Group, evaluation, steps, write_run

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
WIDE, NARROW = (1280, 900), (420, 900)

# fraction of the pixels of a canvas that are not transparent, and the most frequent colors
_INK = """canvas => {
    const {width, height} = canvas;
    const data = canvas.getContext("2d").getImageData(0, 0, width, height).data;
    let drawn = 0;
    for (let i = 3; i < data.length; i += 4) drawn += data[i] > 0;
    return drawn;
}"""
_HAS_COLOR = """(canvas, wanted) => {
    const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    for (let i = 0; i < data.length; i += 4)
        if (data[i + 3] > 250 && Math.hypot(...wanted.map((value, k) => value - data[i + k])) < 12) return true;
    return false;
}"""
LIGHT_BLUE, DARK_BLUE = [0x00, 0x69, 0xB4], [0x5F, 0xB0, 0xF5]  # --series-1


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with everything, among it text that would like to be more than text."""
    folder = tmp_path_factory.mktemp("report")
    rewards = {f"rewards/{HOSTILE}/mean": 0.5}
    metrics = [
        {**row, **rewards, "rewards/b/mean": 0.01 * row["step"], "entropy": 1.0 - 0.01 * row["step"]}
        for row in steps(40)
    ]
    run = write_run(
        folder,
        metrics=metrics,
        evaluations=[evaluation(0, 0.1), evaluation(20, 0.6), evaluation(40, 0.9)],
        groups=[
            Group(rewards=[0.0, 1.0], prompt=HOSTILE, text=HOSTILE, step=1),
            Group(rewards=[1.0, 1.0], prompt=HOSTILE, text="x" * 3000, step=9),
        ],
    )
    spans = [
        {"name": name, "track": track, "start": start, "end": end, "details": {"step": step, "text": HOSTILE}}
        for step in (1, 2)
        for name, track, start, end in (
            ("step", "trainer", 100.0 + step, 101.0 + step),
            ("generate", "rollout/0", 100.0 + step, 100.5 + step),
        )
    ]
    run.events.write_text("".join(json.dumps(span) + "\n" for span in spans))
    return write_report([run])


def _open(watched: WatchedPage, report: Path, refused: list[str] | None = None) -> Page:
    """Opens the file with no way out: a request for anything else that would leave the browser is refused, and noted."""

    def only_files(route: Route) -> None:
        if route.request.url.startswith("file:"):
            route.continue_()
        else:
            assert refused is not None, route.request.url
            refused.append(route.request.url)
            route.abort()

    watched.page.route("**/*", only_files)
    watched.page.goto(report.as_uri())
    watched.page.wait_for_selector("html[data-ready]")
    return watched.page


@pytest.fixture(scope="module")
def opened(browser: Browser, report: Path) -> Iterator[WatchedPage]:
    with watched_page(browser, size=WIDE) as watched:
        _open(watched, report)
        yield watched


@pytest.fixture
def wide(opened: WatchedPage) -> Iterator[WatchedPage]:
    """The report, opened once for all tests that leave it as they found it."""
    yield opened
    opened.assert_quiet()


def test_every_plot_is_drawn_and_nothing_is_asked_for(wide: WatchedPage) -> None:
    requests: list[str] = []
    wide.page.on("request", lambda request: requests.append(request.url))
    canvases = wide.page.locator(".chart-plot canvas")
    assert canvases.count() >= 20
    ink = [canvases.nth(number).evaluate(_INK) for number in range(canvases.count())]
    assert min(ink) > 300
    assert wide.page.locator("#chart-reward .chart-plot canvas").evaluate(_HAS_COLOR, LIGHT_BLUE)
    wide.page.locator("#chart-reward .chart-plot").hover()
    assert requests == []


def test_hostile_text_is_text(wide: WatchedPage) -> None:
    assert wide.page.locator("img").count() == 0
    assert HOSTILE in wide.page.locator("article pre").all_inner_texts()
    assert wide.page.locator("#chart-reward-parts .chart-legend").get_by_text(HOSTILE).count() == 1
    assert wide.dialogs == []


def test_a_script_that_somebody_puts_into_the_file_does_not_run(browser: Browser, report: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed.html"
    text = report.read_text(encoding="utf-8")
    changed.write_text(text.replace("</main>", "<script>alert(1)</script><img src='https://example.com/x'></main>"))
    with watched_page(browser, size=WIDE) as watched:
        refused: list[str] = []
        _open(watched, changed, refused)
        assert watched.dialogs == []
        assert refused == []  # the policy stops it inside the browser
        assert sum("Content Security Policy" in error for error in watched.errors) == 2


def test_the_cursor_shows_the_values_in_every_plot_and_keys_move_it(wide: WatchedPage) -> None:
    plot = wide.page.locator("#chart-reward .chart-plot")
    plot.focus()
    wide.page.keyboard.press("Home")
    assert wide.page.locator("#chart-reward .chart-at").inner_text() == "step 1"
    assert wide.page.locator("#chart-entropy output").inner_text() == "0.99"  # 1 - 0.01 x 1
    wide.page.keyboard.press("ArrowRight")
    wide.page.keyboard.press("ArrowRight")
    assert wide.page.locator("#chart-entropy .chart-at").inner_text() == "step 3"
    assert wide.page.locator("#chart-entropy output").inner_text() == "0.97"
    wide.page.keyboard.press("End")
    assert wide.page.locator("#chart-entropy output").inner_text() == "0.6"


def _becomes_true(page: Page, condition: Callable[[], Any]) -> bool:
    """What the page does in its next frame, which comes when the machine has time for it."""
    for _ in range(500):
        if condition():
            return True
        page.wait_for_timeout(20)
    return False


def test_plots_have_the_colors_of_the_scheme_also_when_it_changes_and_for_paper(browser: Browser, report: Path) -> None:
    with watched_page(browser, size=NARROW, color_scheme="dark") as watched:
        page = _open(watched, report)
        canvas = page.locator("#chart-reward .chart-plot canvas")
        assert canvas.evaluate(_HAS_COLOR, DARK_BLUE)
        page.emulate_media(color_scheme="light")
        assert _becomes_true(page, lambda: canvas.evaluate(_HAS_COLOR, LIGHT_BLUE))
        page.emulate_media(color_scheme="dark")
        assert _becomes_true(page, lambda: canvas.evaluate(_HAS_COLOR, DARK_BLUE))
        page.emulate_media(media="print")
        assert _becomes_true(page, lambda: canvas.evaluate(_HAS_COLOR, LIGHT_BLUE))
        assert not page.locator("nav").is_visible()
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        watched.assert_quiet()


def test_the_page_fits_its_window(browser: Browser, report: Path) -> None:
    with watched_page(browser, size=WIDE) as watched:
        page = _open(watched, report)
        chart = page.locator("#chart-reward")
        script = "element => Math.abs(element.clientWidth - element.querySelector('.uplot').clientWidth) <= 2"
        for width in (WIDE[0], 360, 600):
            page.set_viewport_size({"width": width, "height": 900})
            assert _becomes_true(page, lambda: page.evaluate("document.documentElement.scrollWidth") <= width)  # noqa: B023
            assert _becomes_true(page, lambda: chart.evaluate(script))
        watched.assert_quiet()
