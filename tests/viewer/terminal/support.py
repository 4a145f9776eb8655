"""A run with every kind of group, and the inspector driven by textual's pilot on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias, TypeVar

from textual.pilot import Pilot
from textual.widgets import Input

from grpo_async.records import GroupStatus
from grpo_async.run_directory import RunDir
from grpo_async.store import RolloutStore
from grpo_async.store.table import RolloutTable
from grpo_async.viewer.terminal.app import Inspector
from grpo_async.viewer.terminal.base import Session
from grpo_async.viewer.token_text import TokenTexts
from tests.store.builders import (
    append,
    append_simple,
    build_failed_rollout,
    build_group,
    build_rollout,
    build_sample,
    build_stats,
    build_tool_rollout,
)

SIZES = ((80, 24), (140, 45))
HOSTILE = "[red]x[/] \x1b]0;title\x07\x1b[2J [bold @click=app.quit]press[/]"
Screen = TypeVar("Screen")
Scenario: TypeAlias = Callable[[Inspector, Pilot[None]], Awaitable[None]]
DEADLINE_S = 120.0


def fill(store: RolloutStore) -> None:
    """Groups 0..5 in steps 1..4: plain, with tools and stats, stale, failed, hostile, and the prompt of group 0 again."""
    append_simple(store, 0, step=1, rewards=(0.0, 0.5), text="what is 1 + 1?", answer="three or four")
    calling, plain = build_tool_rollout("1-0"), build_rollout("1-1", ids=(5, 6, 7, 8))
    stats = {"1-0": build_stats(3), "1-1": build_stats(4)}
    samples = [build_sample(1, calling, 1.0, 0.75), build_sample(1, plain, 0.0, -0.75)]
    append(store, build_group(1, [calling, plain], answer="3"), samples, GroupStatus.TRAINED, 2, stats=stats)
    append_simple(store, 2, step=3, status=GroupStatus.STALE, truncated=True, num_tokens=9, text="count sheep")
    append(store, build_group(3, [build_failed_rollout("3-0", HOSTILE)]), [], GroupStatus.FAILED, None)
    append_simple(store, 4, step=3, text=HOSTILE, answer=HOSTILE)
    append_simple(store, 5, step=4, rewards=(1.0, 0.5), text="what is 1 + 1?", answer="two and four")
    store.flush()


def drive(
    run: Path | RunDir,
    scenario: Scenario,
    *,
    size: tuple[int, int] = (80, 24),
    text: str = "",
    sort: str = "",
    texts: TokenTexts | str = "token texts are left out: why",
    with_superseded: bool = False,
) -> None:
    """Run the inspector on a run or an evaluation while `scenario` presses keys. New rows are read when `app.poll()` is called."""
    run_dir = run if isinstance(run, RunDir) else RunDir(run)

    async def main() -> None:
        with RolloutTable.open(run_dir.rollouts) as table:
            session = Session(run=run_dir, name="demo", table=table, texts=texts, with_superseded=with_superseded)
            app = Inspector(session, text=text, sort=sort, poll_every_s=3600.0)
            async with asyncio.timeout(DEADLINE_S), app.run_test(size=size) as pilot:
                await settle(pilot)
                await scenario(app, pilot)

    asyncio.run(main())


async def settle(pilot: Pilot[None]) -> None:
    """Until what was started by the last key is on the screen."""
    await pilot.pause()
    while pilot.app.workers:
        await pilot.app.workers.wait_for_complete()
        await pilot.pause()


async def press(pilot: Pilot[None], *keys: str) -> None:
    for key in keys:
        await pilot.press(key)
        await settle(pilot)


async def type_filter(pilot: Pilot[None], text: str) -> None:
    """/, the text (at once: a key takes a while), enter."""
    await press(pilot, "slash")
    pilot.app.screen.query_one(Input).value = text
    await press(pilot, "enter")


def shown(app: Inspector) -> str:
    """The characters on the screen, line by line."""
    width, height = app.size
    strips = app.screen._compositor.render_strips(app.size)
    lines = ["".join(segment.text for segment in strip)[:width].rstrip() for strip in strips]
    assert len(lines) == height
    return "\n".join(lines)


def on(app: Inspector, kind: type[Screen]) -> Screen:
    """The screen that is open, which must be of a kind."""
    assert isinstance(app.screen, kind), f"{app.screen} is open"
    return app.screen
