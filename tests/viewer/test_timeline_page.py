"""static/timeline.js in a real browser: it draws, zooms, moves, tells what is under the pointer, in both themes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from grpo_async.tracking.timeline_file import Event
from grpo_async.viewer.timeline import drawing

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

STATIC = Path(__file__).parents[2] / "grpo_async" / "viewer" / "static"
# as strict as the pages that host it: nothing inline, nothing from elsewhere
_POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'"
_HTML = """<!doctype html><html><head><meta charset="utf-8"><link rel="stylesheet" href="/theme.css">
<script src="/timeline.js"></script></head><body><div id="place"></div></body></html>"""

_DRAW = """data => {
  window.clicked = []; window.selected = []; window.windows = [];
  window.view = Timeline.draw(document.getElementById("place"), data, {
    onRollout: id => clicked.push(id), onSelect: span => selected.push(span.name), onWindow: (a, b) => windows.push([a, b]),
  });
}"""


def _event(lane: str, name: str, start: float, end: float, **details: Any) -> Event:
    return Event(name, lane, 1e9 + start, 1e9 + end, details)


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


class _Site:
    """A page with the timeline. `problems`: errors of the page, and what the policy refused."""

    def __init__(
        self, browser: Browser, *, size: tuple[int, int] = (1000, 700), dark: bool = False, scale: float = 1
    ) -> None:
        self.problems: list[str] = []
        self.context = browser.new_context(
            viewport={"width": size[0], "height": size[1]},
            color_scheme="dark" if dark else "light",
            device_scale_factor=scale,
        )
        self.page: Page = self.context.new_page()
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("console", lambda line: self.problems.append(line.text) if line.type == "error" else None)
        self.page.on("dialog", lambda dialog: self.problems.append(f"dialog {dialog.message}"))
        self.page.route("**/*", self._answer)
        self.page.goto("http://timeline.test/")

    def _answer(self, route: Any) -> None:
        name = route.request.url.rpartition("/")[2]
        if name == "":
            route.fulfill(body=_HTML, content_type="text/html", headers={"Content-Security-Policy": _POLICY})
        elif name in ("theme.css", "timeline.js"):
            route.fulfill(path=STATIC / name)
        else:
            route.fulfill(status=204)

    def draw(self, data: dict[str, Any]) -> None:
        self.page.evaluate(_DRAW, data)
        self.settle()

    def settle(self) -> None:
        """Until what was asked for is drawn."""
        self.page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")

    def window(self) -> tuple[float, float]:
        found = self.page.evaluate("view.window()")
        return found["start"] - 1e9, found["end"] - 1e9

    def find(self, name: str) -> tuple[float, float]:
        """Where on the canvas a span of this name is, and the page's coordinates of it."""
        found = self.page.evaluate(
            """name => {
              const box = document.querySelector("canvas").getBoundingClientRect();
              for (let y = 34; y < box.height; y += 2) for (let x = 84; x < box.width; x += 3)
                if (view.spanAt(x, y)?.name === name) return [box.left + x + 2, box.top + y + 2];
            }""",
            name,
        )
        assert found is not None, f"{name} is not drawn"
        return found[0], found[1]

    def tip(self) -> str:
        return str(self.page.locator("#place div div").nth(1).text_content())

    def colours(self) -> int:
        """How many different ones the canvas has."""
        return int(
            self.page.evaluate(
                """() => {
                  const canvas = document.querySelector("canvas");
                  const data = new Uint32Array(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data.buffer);
                  return new Set(data).size;
                }"""
            )
        )

    def background(self) -> list[int]:
        found: list[int] = self.page.evaluate(
            """() => Array.from(document.querySelector("canvas").getContext("2d").getImageData(200, 200, 1, 1).data)"""
        )
        return found


@pytest.fixture
def site(browser: Browser) -> Iterator[_Site]:
    made = _Site(browser)
    yield made
    assert made.problems == []
    made.context.close()


def test_it_draws_and_tells_what_is_under_the_pointer(site: _Site) -> None:
    site.draw(_data())
    assert site.colours() > 8
    site.page.mouse.move(*site.find("generate"))
    tip = site.tip()
    assert "generate · 4.00 s" in tip
    assert "tokens: 17" in tip
    assert "rollout/0 · at 0.000 s" in tip
    label = site.page.locator("canvas").get_attribute("aria-label")
    assert label is not None
    assert "trainer, rollouts, inference servers" in label


def test_text_of_a_model_is_shown_and_never_run(site: _Site) -> None:
    site.draw(_data(_event("<b>x</b>", "<script>alert(2)</script>", 0, 10)))
    site.page.mouse.move(*site.find("tools"))
    assert "<img src=x onerror=alert(1)>" in site.tip()
    site.page.mouse.move(*site.find("<script>alert(2)</script>"))
    assert "<b>x</b>" in site.tip()
    assert site.page.locator("#place img, #place script, #place b").count() == 0


def test_a_click_on_a_rollout_names_it_and_one_elsewhere_the_span(site: _Site) -> None:
    site.draw(_data())
    site.page.mouse.click(*site.find("rollout"))
    site.page.mouse.click(*site.find("backward"))
    assert site.page.evaluate("clicked") == ["g0-r0"]
    assert site.page.evaluate("selected") == ["backward"]


def test_keys_and_the_wheel_zoom_and_move_and_the_host_hears_of_it(site: _Site) -> None:
    site.draw(_data())
    whole = site.window()
    assert whole[0] == pytest.approx(-0.1)
    assert whole[1] == pytest.approx(10.1)
    site.page.locator("canvas").focus()
    site.page.keyboard.press("w")
    near = site.window()
    assert near[1] - near[0] == pytest.approx(0.7 * (whole[1] - whole[0]))
    site.page.keyboard.press("ArrowRight")
    moved = site.window()
    assert moved[0] > near[0]
    assert moved[1] - moved[0] == pytest.approx(near[1] - near[0])
    x, y = site.find("forward")
    site.page.mouse.move(x, y)
    site.page.keyboard.down("Control")
    site.page.mouse.wheel(0, -200)
    site.page.keyboard.up("Control")
    site.page.wait_for_function("span => view.window().end - view.window().start < span * 0.8", arg=near[1] - near[0])
    site.page.mouse.dblclick(*site.find("forward"))
    assert site.window() == (pytest.approx(4.8), pytest.approx(7.2))
    site.page.wait_for_function("() => windows.length > 0")
    site.page.keyboard.press("f")
    assert site.window() == (pytest.approx(whole[0]), pytest.approx(whole[1]))


def test_dragging_moves_what_is_drawn_with_the_pointer(site: _Site) -> None:
    site.draw(_data())
    site.page.evaluate("view.show(1e9 + 4, 1e9 + 6)")
    site.settle()
    before = site.window()
    site.page.mouse.move(500, 80)
    site.page.mouse.down()
    site.page.mouse.move(400, 80, steps=4)
    site.page.mouse.up()
    after = site.window()
    assert after[1] - after[0] == pytest.approx(before[1] - before[0])
    assert 0.15 < after[0] - before[0] < 0.3  # 100 of about 900 pixels, which are 2 s
    assert site.page.evaluate("clicked.length + selected.length") == 0  # a drag is no click


def test_a_title_folds_its_lanes_into_how_many_there_are(site: _Site) -> None:
    site.draw(_data())
    _, y = site.find("rollout")
    site.page.mouse.click(40, y - 12)
    assert site.page.evaluate("view.spanAt(200, 60)") is not None  # the trainer's are still there
    with pytest.raises(AssertionError, match="generate is not drawn"):
        site.find("generate")


def test_newer_data_keep_the_window_that_is_looked_at(site: _Site) -> None:
    site.draw(_data())
    site.page.evaluate("view.show(1e9 + 4, 1e9 + 6)")
    site.page.evaluate("data => view.update(data)", _data(_event("trainer", "train", 10, 20)))
    assert site.window() == (pytest.approx(4), pytest.approx(6))
    site.page.evaluate("view.destroy()")
    assert site.page.locator("#place *").count() == 0
    site.draw({"spans": []})  # nothing happened yet
    site.page.mouse.move(300, 20)
    site.page.keyboard.press("w")


@pytest.mark.nightly  # that a drawing of 100,000 spans is small is guarded by tests/viewer/test_trace.py
def test_a_hundred_thousand_spans_stay_fast(site: _Site) -> None:
    site.page.evaluate(
        """() => {
          window.data = {spans: [], first: 1e9, last: 1e9 + 1002};
          for (let n = 0; n < 100000; n++) data.spans.push({
            lane: `rollout/${n % 128}`, depth: 0, name: n % 3 ? "generate" : "tools",
            start: 1e9 + n / 100, end: 1e9 + n / 100 + 1.2, details: {rollout: `g${n}`},
          });
          for (let n = 0; n < 100; n++) data.spans.push({
            lane: "trainer", depth: 0, name: "step", start: 1e9 + n * 10, end: 1e9 + n * 10 + 9, details: {step: n},
          });
        }"""
    )
    began = time.monotonic()
    site.page.evaluate("window.view = Timeline.draw(document.getElementById('place'), data)")
    site.page.mouse.click(40, 34 + 20 + 19 + 6 + 10)  # unfold the rollouts
    site.settle()
    drawn_s = time.monotonic() - began
    assert drawn_s < 15.0
    frame_ms = site.page.evaluate(
        """async () => {
          const began = performance.now();
          for (let n = 0; n < 10; n++) {
            view.show(1e9 + n, 1e9 + 1000 - n);
            await new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
          }
          return (performance.now() - began) / 10;
        }"""
    )
    print(f"{drawn_s:.1f} s to the first drawing, {frame_ms:.0f} ms for two frames with 100,000 spans")
    assert frame_ms < 1000.0


@pytest.mark.parametrize(("dark", "size"), [(False, (800, 600)), (True, (1600, 900))])
def test_it_follows_size_theme_and_pixel_density(browser: Browser, dark: bool, size: tuple[int, int]) -> None:
    site = _Site(browser, size=size, dark=dark, scale=2)
    site.draw(_data())
    canvas = site.page.evaluate(
        "[document.querySelector('canvas').width, document.querySelector('canvas').clientWidth]"
    )
    assert canvas[0] == 2 * canvas[1]
    assert canvas[1] <= size[0]
    assert (sum(site.background()[:3]) < 300) is dark
    assert site.colours() > 8
    site.page.emulate_media(color_scheme="light" if dark else "dark")
    site.settle()
    assert (sum(site.background()[:3]) < 300) is not dark
    site.page.set_viewport_size({"width": 500, "height": 600})
    site.page.wait_for_function("() => document.querySelector('canvas').clientWidth <= 500")
    assert site.problems == []
    site.context.close()
