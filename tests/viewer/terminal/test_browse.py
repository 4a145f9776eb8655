"""The first screen: groups, rollouts and steps; filter, order, growth."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from grpo_async.records import GroupStatus
from grpo_async.store.summaries import GroupSummary, RolloutSummary, StepSummary
from grpo_async.viewer.terminal.app import Inspector
from grpo_async.viewer.terminal.base import HelpScreen
from grpo_async.viewer.terminal.browse import BrowseScreen
from grpo_async.viewer.terminal.group import GroupScreen
from grpo_async.viewer.terminal.rollout import RolloutScreen
from tests.store.builders import OpenStore, append, append_simple, build_group, build_rollout
from tests.viewer.terminal.support import SIZES, drive, fill, on, press, settle, shown, type_filter


def _rows(app: Inspector) -> list[GroupSummary | RolloutSummary | StepSummary | None]:
    table = on(app, BrowseScreen).table
    return [table.peek(position) for position in range(table.total)]


def _groups(app: Inspector) -> list[int]:
    return [row.group_id for row in _rows(app) if isinstance(row, GroupSummary)]


@pytest.mark.parametrize("size", SIZES)
def test_the_newest_groups_come_first_and_fit_the_screen(run: Path, size: tuple[int, int]) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        assert _groups(app) == [5, 4, 3, 2, 1, 0]
        lines = shown(app).splitlines()
        assert "11 rollouts in 6 groups" in lines[1]
        assert lines[3].split()[:6] == ["4", "5", "trained", "2", "0.750", "3.0" if size[0] == 80 else "0.354"]
        assert "what is 1 + 1?"[: size[0] - 66] in lines[3]
        assert "? help" in lines[-1]
        assert ("std" in lines[2]) is (size[0] == 140)  # more columns where there is room

    drive(run, scenario, size=size)


def test_v_shows_rollouts_and_steps_and_a_step_opens_its_groups(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "v")
        ids = [row.rollout_id for row in _rows(app) if isinstance(row, RolloutSummary)]
        assert sorted(ids) == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1", "3-0", "4-0", "4-1", "5-0", "5-1"]
        await press(pilot, "v")
        steps = [row.step for row in _rows(app) if isinstance(row, StepSummary)]
        assert steps == [4, 3, 2, 1, None]  # the newest first, those that no step saw last
        await press(pilot, "down", "enter")
        assert _groups(app) == [4, 2]
        await press(pilot, "x", "v", "v", "G", "enter")
        assert _groups(app) == [3]

    drive(run, scenario)


def test_an_empty_run_says_so_and_fills_by_itself(tmp_path: Path, open_store: OpenStore) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        assert "has no rollouts yet" in " ".join(shown(app).split())  # a long path breaks the line
        await press(pilot, "enter", "o", "y", "v", "v", "v")  # nothing to open: nothing happens
        append_simple(open_store(tmp_path / "rollouts"), 0)
        app.poll()
        await settle(pilot)
        assert _groups(app) == [0]

    drive(tmp_path, scenario)


def test_hostile_text_is_shown_and_not_obeyed(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        seen = []
        for keys in ("", "v", "v", "v down enter", "enter", "T", "q q down enter", "enter"):
            await press(pilot, *keys.split())
            seen.append(shown(app))
        for page in seen:
            assert "\x1b" not in page
            assert "\x07" not in page
        everything = "\n".join(seen)
        assert "[red]x[/]" in everything
        assert "␛]0;title␇␛[2J" in everything
        assert app.is_running  # [@click] did not end it

    drive(run, scenario)


def test_a_filter_is_typed_explained_where_it_is_wrong_and_taken_away(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await type_filter(pilot, "reward<0.2 and not truncated")
        assert _groups(app) == [4, 1, 0]
        assert "3 rollouts in 3 groups" in shown(app)
        assert "1/2" in shown(app).splitlines()[3]  # one of two rollouts is like that
        await press(pilot, "x")
        assert len(_groups(app)) == 6
        for wrong, where, remedy in (
            ("trained and rewrd<0.2", "rewrd", "did you mean reward"),
            ("rewards['exat']<1", "exat", "there are exact"),
        ):
            await type_filter(pilot, wrong)
            lines = shown(app).splitlines()
            assert lines[2].index("^^^") == lines[1].index(where)
            assert remedy in lines[3]
            assert len(_groups(app)) == 6  # what is shown stays
            await press(pilot, "escape")
            assert "^^^" not in shown(app)
            assert on(app, BrowseScreen).table.has_focus
        await type_filter(pilot, "reward>100")
        assert "No rollout is like that. x takes the filter away" in shown(app)
        await press(pilot, "x", "slash", "up", "up", "enter")
        assert _groups(app) == [4, 1, 0]  # an earlier query comes back

    drive(run, scenario)


def test_keys_clicks_and_the_command_line_sort(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        assert _groups(app) == [5, 1, 0]
        assert "by reward, highest first" in shown(app)
        await press(pilot, "x", "4")  # step, group, status, reward
        assert _groups(app)[0] == 0  # 0.25 is the lowest mean
        assert "reward▴" in shown(app)
        await press(pilot, "S")
        assert "reward▾" in shown(app)
        await press(pilot, "s")
        assert "length▾" in shown(app)  # std, between them, has no room here
        assert _groups(app)[0] == 2
        left = shown(app).splitlines()[2].index("length")
        await pilot.click("#rows", offset=(left + 1, 0))
        await settle(pilot)
        assert "length▴" in shown(app)
        await pilot.click("#rows", offset=(10, 3))
        assert on(app, BrowseScreen).table.cursor == 2
        await pilot.click("#rows", offset=(10, 3))
        await settle(pilot)
        on(app, GroupScreen)

    async def wrong(app: Inspector, pilot: Pilot[None]) -> None:
        assert "age" in shown(app)
        assert _groups(app) == [5, 4, 3, 2, 1, 0]

    drive(run, scenario, text="trained and not text like '%press%'", sort="-reward")
    drive(run, wrong, sort="-age")


def test_new_rows_are_announced_and_shown_when_asked_for(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path / "rollouts")
    fill(store)

    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "down", "down")
        before = shown(app).splitlines()
        append_simple(store, 6, step=5)
        append_simple(store, 7, step=5)
        append_simple(store, 8, step=5, truncated=True)  # the filter does not let it through
        app.poll()
        await settle(pilot)
        after = shown(app).splitlines()
        assert "2 new groups since: r shows them" in after[2]
        assert after[3:-2] == before[2:-3]  # nothing moves
        assert on(app, BrowseScreen).table.cursor == 2
        await press(pilot, "r")
        assert _groups(app)[:2] == [7, 6]
        assert "new groups since" not in shown(app)
        await press(pilot, "f")
        append_simple(store, 9, step=6)
        app.poll()
        await settle(pilot)
        assert _groups(app)[0] == 9
        assert "following" in shown(app)

    drive(tmp_path, scenario, text="not truncated")


def test_the_other_screens_are_reached_and_left(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "y")
        assert app.clipboard == "5"
        await press(pilot, "Y")
        assert app.clipboard == "grpo-async inspect-rollouts demo --group 5 --superseded"
        await press(pilot, "o")
        assert _groups(app) == [0, 1, 3, 5]  # the other steps of its prompt, in their order
        assert on(app, BrowseScreen).table.cursor == 3
        await press(pilot, "g", "enter")
        assert "group 0" in shown(app).splitlines()[0]
        await press(pilot, "n")
        assert "group 1" in shown(app).splitlines()[0]
        await press(pilot, "q", "q", "enter", "right", "y")
        assert app.clipboard == "5-1"
        await press(pilot, "enter", "Y")
        assert app.clipboard == "grpo-async inspect-rollouts demo --rollout 5-1 --superseded"
        on(app, RolloutScreen)
        await press(pilot, "escape")
        on(app, GroupScreen)
        await press(pilot, "q", "question_mark")
        on(app, HelpScreen)
        page = shown(app)
        assert "open the group" in page
        for _ in range(12):
            await press(pilot, "space")
            page += shown(app)
        for expected in (
            "reward < 0.2 and truncated",
            "group_status",
            "further columns of the dataset",
            "True or false",
        ):
            assert expected in page
        await press(pilot, "q")
        await type_filter(pilot, "group_status='failed'")
        await press(pilot, "enter")
        assert "[error] [red]x[/]" in shown(app)
        await press(pilot, "enter")
        assert "nothing was generated" in shown(app)
        await press(pilot, "right", "down", "c", "t", "T", "g", "G", "q", "q")  # no token to go to
        on(app, BrowseScreen)
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running or app._exit

    drive(run, scenario, with_superseded=True)


def test_a_long_table_reads_only_the_pages_it_shows(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path / "rollouts")
    for group_id in range(300):
        append(store, build_group(group_id, [build_rollout(f"{group_id}-0")]), [], GroupStatus.TRAINED, group_id)
    store.flush()

    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        table = on(app, BrowseScreen).table
        assert table.total == 300
        await press(pilot, "G")
        assert table.cursor == 299
        assert shown(app).splitlines()[-2].split()[1] == "0"  # the oldest group, on the last line of the table
        assert table.peek(100) is None
        append_simple(store, 300, step=300)
        append_simple(store, 301, step=301)
        app.poll()
        await settle(pilot)
        row = await table.row(100)  # pages that are read later fit to those that are there: nothing moves by two
        assert isinstance(row, GroupSummary)
        assert row.group_id == 199
        await press(pilot, "pageup", "k")
        assert table.cursor < 290
        await press(pilot, "g")
        assert shown(app).splitlines()[4].split()[1] == "299"  # below the line that announces

    drive(tmp_path, scenario)
