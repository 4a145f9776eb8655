"""static/timeline.js in a real browser: it draws, zooms, moves, tells what is under the pointer, in both themes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from grpo_async.tracking.timeline_file import Event
from grpo_async.viewer.timeline import drawing
from tests.support.browser import WatchedPage, watched_page

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, Route

STATIC = Path(__file__).parents[2] / "grpo_async" / "viewer" / "static"
ORIGIN = "http://timeline.test"
# as strict as the pages that host it: nothing inline, nothing from elsewhere
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'"
_HTML = """<!doctype html><html><head><meta charset="utf-8"><link rel="stylesheet" href="/theme.css">
<script src="/charts.js"></script><script src="/timeline.js"></script></head><body><div id="place"></div></body></html>"""

_DRAW = """data => {
  window.clicked = []; window.windows = [];
  window.view = Timeline.draw(document.getElementById("place"), data, {
    onRollout: id => clicked.push(id), onWindow: (a, b) => windows.push([a, b]),
  });
}"""
# where on the canvas a span of this name is, in the page's coordinates
_FIND = """name => {
  const box = document.querySelector("canvas").getBoundingClientRect();
  for (let y = 34; y < box.height; y += 2) for (let x = 84; x < box.width; x += 3)
    if (view.spanAt(x, y)?.name === name) return [box.left + x + 2, box.top + y + 2];
  return null;
}"""
_NEXT_FRAMES = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))"
_COLORS = """() => {
  const canvas = document.querySelector("canvas");
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer;
  return new Set(new Uint32Array(data)).size;
}"""


def _event(track: str, name: str, start: float, end: float, **details: Any) -> Event:
    return Event(name, track, 1e9 + start, 1e9 + end, details)


def _data(*more: Event) -> dict[str, Any]:
    """Ten seconds: trainer waits 0-5, trains 5-10; two rollouts 0-5, one of which calls a tool."""
    events = [
        _event("trainer", "step", 0, 10, step=1),
        _event("trainer", "wait for samples", 0, 5, step=1),
        _event("trainer", "train", 5, 10, step=1),
        _event("trainer", "forward", 5, 7),
        _event("trainer", "backward", 7, 10),
        _event("rollout/0", "rollout", 0, 5, rollout="g0-r0", group="g0"),
        _event("rollout/0", "generate", 0, 4, turn=0, tokens=17),
        _event("rollout/0", "tools", 4, 5, calls=["<img src=x onerror=alert(1)>"]),
        _event("rollout/1", "rollout", 0, 3, rollout="g0-r1", group="g0"),
        _event("server/0", "down", 8, 9, reason="exit code 1"),
        _event("server/0", "up", 9.5, 9.5),
    ]
    found = drawing([*events, *more])
    assert found is not None
    return dict(json.loads(json.dumps(found)))


def _open(watched: WatchedPage) -> Page:
    def answer(route: Route) -> None:
        name = route.request.url.rpartition("/")[2]
        if name == "favicon.ico":
            route.fulfill(status=204)
        elif name:
            route.fulfill(path=STATIC / name)
        else:
            route.fulfill(body=_HTML, content_type="text/html", headers={"Content-Security-Policy": _POLICY})

    watched.page.route("**/*", answer)
    watched.page.goto(f"{ORIGIN}/")
    return watched.page


@pytest.fixture
def draw(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Draws data on an empty page; at the end nothing may have gone wrong in it."""
    with watched_page(browser, origin=ORIGIN, size=(1000, 700)) as watched:
        page = _open(watched)

        def drawn(data: dict[str, Any] | None = None) -> Page:
            page.evaluate(_DRAW, _data() if data is None else data)
            page.evaluate(_NEXT_FRAMES)
            return page

        yield drawn
        watched.assert_quiet()


def _find(page: Page, name: str) -> tuple[float, float]:
    found = page.evaluate(_FIND, name)
    assert found is not None, f"{name} is not drawn"
    return found[0], found[1]


def _window(page: Page) -> tuple[float, float]:
    found = page.evaluate("view.window()")
    return found["start"] - 1e9, found["end"] - 1e9


def _tip(page: Page, name: str) -> str:
    page.mouse.move(*_find(page, name))
    return str(page.locator("#place div div").nth(1).text_content())


def test_it_draws_and_tells_what_is_under_the_pointer_as_text(draw: Callable[..., Page]) -> None:
    page = draw(_data(_event("<b>x</b>", "<script>alert(2)</script>", 0, 10)))
    assert page.evaluate(_COLORS) > 8
    tip = _tip(page, "generate")
    for expected in ("generate · 4 s", "tokens: 17", "rollout/0 · at 0.000 s"):
        assert expected in tip
    label = page.locator("canvas").get_attribute("aria-label")
    assert label is not None
    assert "trainer, rollouts, inference servers" in label
    assert "<img src=x onerror=alert(1)>" in _tip(page, "tools")
    assert "<b>x</b>" in _tip(page, "<script>alert(2)</script>")
    assert page.locator("#place img, #place script, #place b").count() == 0


def test_a_click_opens_a_rollout_and_folds_by_a_title(draw: Callable[..., Page]) -> None:
    page = draw()
    page.mouse.click(*_find(page, "rollout"))
    page.mouse.click(*_find(page, "backward"))
    assert page.evaluate("clicked") == ["g0-r0"]
    _, y = _find(page, "rollout")
    page.mouse.click(40, y - 12)  # the tracks become a curve of how many there are
    assert page.evaluate("view.spanAt(200, 60)") is not None  # the trainer's are still there
    assert page.evaluate(_FIND, "generate") is None


def test_keys_the_wheel_and_the_pointer_zoom_and_move_and_the_host_hears_of_it(draw: Callable[..., Page]) -> None:
    page = draw()
    whole = _window(page)
    assert whole == (pytest.approx(-0.1), pytest.approx(10.1))
    page.locator("canvas").focus()
    page.keyboard.press("w")
    near = _window(page)
    size = near[1] - near[0]
    assert size == pytest.approx(0.7 * (whole[1] - whole[0]))
    page.keyboard.press("ArrowRight")
    moved = _window(page)
    assert moved[0] > near[0]
    assert moved[1] - moved[0] == pytest.approx(size)
    page.mouse.move(*_find(page, "forward"))
    page.keyboard.down("Control")
    page.mouse.wheel(0, -200)
    page.keyboard.up("Control")
    page.wait_for_function("span => view.window().end - view.window().start < span * 0.8", arg=size)
    page.mouse.dblclick(*_find(page, "forward"))
    assert _window(page) == (pytest.approx(4.8), pytest.approx(7.2))
    page.wait_for_function("() => windows.length > 0")
    page.keyboard.press("f")
    assert _window(page) == (pytest.approx(whole[0]), pytest.approx(whole[1]))
    page.evaluate("view.show(1e9 + 4, 1e9 + 6); clicked.length = 0")
    page.evaluate(_NEXT_FRAMES)
    page.mouse.move(500, 80)
    page.mouse.down()
    page.mouse.move(400, 80, steps=4)
    page.mouse.up()
    after = _window(page)
    assert after[1] - after[0] == pytest.approx(2)
    assert 0.15 < after[0] - 4 < 0.3  # 100 of about 900 pixels, which are 2 s
    assert page.evaluate("clicked.length") == 0  # a drag is no click
