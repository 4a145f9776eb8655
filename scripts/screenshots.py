"""Takes the pictures of the pages again: `python -m scripts.screenshots RUNS`, where RUNS is a folder with the four runs of
docs/howto/diagnose.md. Needs playwright, Pillow and Chromium (scripts/install-browser)."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from grpo_async.utils.concurrency import in_thread

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

IMAGES = Path(__file__).resolve().parents[1] / "docs" / "images"
WIDTH = 1200
VIEWS = {
    "inspect-home": ("home", 785),
    "inspector": ("run?run=quickstart", 884),
    "diagnose-boxed": ("run?run=boxed", 340),
    "diagnose-boxed-rollouts": ("rollouts?run=boxed&sort=-length", 740),
    "diagnose-steep": ("run?run=steep", 740),
    "diagnose-short": ("run?run=short", 740),
    "diagnose-short-group": ("group?run=short&id={group}", 700),
}
"""Name of a picture -> the view, and the height of the window."""


@contextlib.contextmanager
def inspector(runs: Path) -> Iterator[str]:
    """Its address, with the token."""
    command = [sys.executable, "-m", "grpo_async", "inspect", runs.name, "--no-browser", "--port", "0"]
    with subprocess.Popen(command, cwd=runs.resolve().parent, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            address = next(line for line in process.stderr if "#token=" in line).split()[-1]
            in_thread(process.stderr.read, name="inspector's stderr")  # a full pipe would stop the inspector
            yield address
        finally:
            process.terminate()


@contextlib.contextmanager
def chromium() -> Iterator[Browser]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        yield browser
        browser.close()


def show(page: Page, address: str) -> None:
    """At the end the view is drawn."""
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("#bar:not(:empty) ~ main:not([aria-busy])")
    page.wait_for_load_state("networkidle")


def main() -> None:
    from PIL import Image

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path)
    parser.add_argument("--group", default="68", help="the group of the run short that the page describes")
    given = parser.parse_args()
    with inspector(given.runs) as address, chromium() as browser:
        page = browser.new_page(color_scheme="light", reduced_motion="reduce")
        show(page, address)
        for name, (view, height) in VIEWS.items():
            page.set_viewport_size({"width": WIDTH, "height": height})
            show(page, f"{address.partition('#')[0]}#/{view.format(group=given.group)}")
            page.screenshot(path=IMAGES / f"{name}.png")
        page.set_viewport_size({"width": 860, "height": 900})
        show(page, f"{address.partition('#')[0]}#/curves?run=quickstart")
        page.wait_for_selector("#bar .run-status:not(:empty)")  # it may take a second row, and moves the panels down
        first, second = (page.locator(".curves > .panel").nth(place).bounding_box() for place in (0, 1))
        assert first is not None
        assert second is not None
        both = {**first, "width": second["x"] + second["width"] - first["x"]}
        page.screenshot(path=IMAGES / "curve.png", clip=both, full_page=True)  # type: ignore[arg-type]
    for name in (*VIEWS, "curve"):
        path = IMAGES / f"{name}.png"
        Image.open(path).convert("RGB").quantize(128).save(path, optimize=True)


if __name__ == "__main__":
    main()
