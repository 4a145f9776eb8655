"""The first screen: groups, rollouts and steps; filter, order, growth."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from grpo_async.store.summaries import GroupSummary, RolloutSummary, StepSummary
from grpo_async.viewer.terminal.app import Inspector
from grpo_async.viewer.terminal.bars import BarsScreen, histogram_text
from grpo_async.viewer.terminal.browse import BrowseScreen
from grpo_async.viewer.terminal.group import GroupScreen
from grpo_async.viewer.terminal.help import HelpScreen
from grpo_async.viewer.terminal.history import HistoryScreen
from grpo_async.viewer.terminal.rollout import RolloutScreen
from tests.store.builders import OpenStore, append_simple
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


def test_a_filter_keeps_the_groups_with_a_matching_rollout(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await type_filter(pilot, "reward<0.2 and not truncated")
        assert _groups(app) == [4, 1, 0]
        assert "3 rollouts in 3 groups" in shown(app)
        assert "1/2" in shown(app).splitlines()[3]  # one of two rollouts is like that
        await type_filter(pilot, "x")  # keys typed while the line has the focus are text
        await press(pilot, "escape", "x")
        assert _groups(app) == [5, 4, 3, 2, 1, 0]

    drive(run, scenario)


def test_a_wrong_query_is_explained_under_its_line_and_changes_nothing(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await type_filter(pilot, "trained and rewrd<0.2")
        lines = shown(app).splitlines()
        assert lines[2].index("^^^^^") == lines[1].index("rewrd")
        assert "rewrd; did you mean reward" in lines[3]
        assert _groups(app) == [5, 4, 3, 2, 1, 0]
        await press(pilot, "escape")
        assert "^^^" not in shown(app)
        assert on(app, BrowseScreen).table.has_focus

    drive(run, scenario)


def test_a_reward_that_no_rollout_has_is_pointed_at_too(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await type_filter(pilot, "reward.exat<1")
        lines = shown(app).splitlines()
        assert lines[2].index("^^^^") == lines[1].index("reward.exat")

    drive(run, scenario)


def test_earlier_queries_come_back_with_the_arrow(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await type_filter(pilot, "stale")
        await press(pilot, "x", "slash", "up", "enter")
        assert _groups(app) == [2]

    drive(run, scenario)


def test_the_command_lines_query_and_order_hold_from_the_start(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        assert _groups(app) == [5, 1, 0]
        assert "by reward, highest first" in shown(app)

    drive(run, scenario, text="group.status=trained and not text~press", sort="-reward")


def test_a_wrong_order_of_the_command_line_is_said_and_the_newest_come_first(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        assert "age" in shown(app)
        assert _groups(app) == [5, 4, 3, 2, 1, 0]

    drive(run, scenario, sort="-age")


def test_keys_sort_by_a_column_and_turn_the_order(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "4")  # step, group, status, reward
        assert _groups(app)[0] == 5
        assert "reward▾" in shown(app)
        await press(pilot, "4")
        assert _groups(app)[0] == 0  # 0.25 is the lowest mean
        assert "reward▴" in shown(app)
        await press(pilot, "S")
        assert _groups(app)[0] == 5
        await press(pilot, "s")
        assert "length▾" in shown(app)  # std, between them, has no room here
        assert _groups(app)[0] == 2

    drive(run, scenario)


def test_a_click_on_a_title_sorts_and_one_on_a_row_chooses_it(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        left = shown(app).splitlines()[2].index("length")
        await pilot.click("#rows", offset=(left + 1, 0))
        await settle(pilot)
        assert _groups(app)[0] == 2
        await pilot.click("#rows", offset=(10, 3))
        assert on(app, BrowseScreen).table.cursor == 2
        await pilot.click("#rows", offset=(10, 3))
        await settle(pilot)
        on(app, GroupScreen)

    drive(run, scenario)


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


def test_new_rows_are_announced_and_do_not_move_the_table(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path / "rollouts")
    fill(store)

    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "down", "down")
        before = shown(app).splitlines()
        append_simple(store, 6, step=5)
        append_simple(store, 7, step=5)
        app.look()
        await settle(pilot)
        after = shown(app).splitlines()
        assert "2 new groups since: r shows them" in after[2]
        assert after[3:-2] == before[2:-3]
        assert on(app, BrowseScreen).table.cursor == 2
        assert "11 rollouts in 6 groups" in after[1]
        await press(pilot, "r")
        assert _groups(app) == [7, 6, 5, 4, 3, 2, 1, 0]
        assert "new groups since" not in shown(app)

    drive(tmp_path, scenario)


def test_the_announcement_counts_only_what_the_filter_lets_through(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path / "rollouts")
    fill(store)

    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        append_simple(store, 6, step=5)
        append_simple(store, 7, step=5, truncated=True)
        app.look()
        await settle(pilot)
        assert "1 new group since: r shows it" in shown(app)

    drive(tmp_path, scenario, text="truncated")


def test_following_shows_new_rows_as_they_come(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path / "rollouts")
    fill(store)

    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "f")
        append_simple(store, 6, step=5)
        app.look()
        await settle(pilot)
        assert _groups(app)[0] == 6
        assert "following" in shown(app)

    drive(tmp_path, scenario)


@pytest.mark.parametrize("size", SIZES)
def test_an_empty_run_says_so_and_fills_by_itself(tmp_path: Path, open_store: OpenStore, size: tuple[int, int]) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        assert "has no rollouts yet" in " ".join(shown(app).split())  # a long path breaks the line
        await press(pilot, "enter", "o", "y", "v", "v", "v")  # nothing to open: nothing happens
        append_simple(open_store(tmp_path / "rollouts"), 0)
        app.look()
        await settle(pilot)
        assert _groups(app) == [0]

    drive(tmp_path, scenario, size=size)


def test_a_filter_that_nothing_is_like_says_how_to_go_on(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await type_filter(pilot, "reward>100")
        assert "No rollout is like that. x takes the filter away" in shown(app)
        await press(pilot, "x")
        assert len(_groups(app)) == 6

    drive(run, scenario)


def test_what_the_store_has_to_say_is_on_the_screen(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path / "rollouts")
    fill(store)
    store.close()
    (block,) = (tmp_path / "rollouts").glob("block-*.jsonl")
    with block.open("ab") as file:
        file.write(b'{"schema": 3, "seq')  # as a kill leaves it

    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        assert "torn" in shown(app)
        assert _groups(app) == [5, 4, 3, 2, 1, 0]

    drive(tmp_path, scenario)


@pytest.mark.parametrize("size", SIZES)
def test_hostile_text_is_shown_and_not_obeyed(run: Path, size: tuple[int, int]) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        seen = []
        for keys in (
            (),
            ("v",),
            ("v",),
            ("v", "down", "enter"),
            ("enter",),
            ("T",),
            ("q", "q", "down", "enter"),
            ("enter",),
        ):
            await press(pilot, *keys)
            seen.append(shown(app))
        for page in seen:
            assert "\x1b" not in page
            assert "\x07" not in page
        everything = "\n".join(seen)
        assert "[red]x[/]" in everything
        assert "␛]0;title␇␛[2J" in everything
        assert app.is_running  # [@click] did not end it

    drive(run, scenario, size=size)


def test_a_group_that_failed_is_opened_with_its_error(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await type_filter(pilot, "group.status=failed")
        await press(pilot, "enter")
        assert "[error] [red]x[/]" in shown(app)
        await press(pilot, "enter")
        on(app, RolloutScreen)
        assert "nothing was generated" in shown(app)
        await press(pilot, "right", "down", "c", "t", "T", "g", "G")  # no token to go to

    drive(run, scenario)


@pytest.mark.parametrize("size", SIZES)
def test_histograms_count_what_the_filter_lets_through(run: Path, size: tuple[int, int]) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "b")
        on(app, BarsScreen)
        page = shown(app)
        assert "reward  8 rollouts" in page
        assert "█" in page
        assert ("advantage" in page) is (size[1] == 45)  # four where there is room
        for histogram in on(app, BarsScreen)._shown:  # every bin is there: its count stands at the end of a line
            lines = histogram_text(histogram, 40).plain.splitlines()
            assert len(lines) == len(histogram.counts) + 1
            for line in lines[1:]:
                assert line.split()[0] in page
        await press(pilot, "right")
        assert "reward  8" not in shown(app)
        await press(pilot, "left", "q")
        on(app, BrowseScreen)

    drive(run, scenario, size=size, text="not stale")


def test_the_same_prompt_at_other_steps(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "o")
        screen = on(app, HistoryScreen)
        groups = [screen.table.peek(position) for position in range(screen.table.total)]
        assert [group.group_id for group in groups if group is not None] == [0, 1, 3, 5]
        assert "mean reward 0.250 -> 0.750 (+0.500)" in shown(app)
        await press(pilot, "g", "enter")
        assert "group 0" in shown(app).splitlines()[0]
        await press(pilot, "n")
        assert "group 1" in shown(app).splitlines()[0]

    drive(run, scenario)


@pytest.mark.parametrize("size", SIZES)
def test_help_has_the_keys_and_the_query_language(run: Path, size: tuple[int, int]) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "question_mark")
        on(app, HelpScreen)
        page = shown(app)
        assert "open the group" in page
        for _ in range(12):
            await press(pilot, "space")
            page += shown(app)
        for expected in ("reward<0.2 and truncated", "group.status", "columns.NAME", "side by side means and"):
            assert expected in page
        await press(pilot, "q")
        on(app, BrowseScreen)

    drive(run, scenario, size=size)


def test_y_copies_the_id_and_the_command_that_shows_it_again(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "y")
        assert app.clipboard == "5"
        await press(pilot, "Y")
        assert app.clipboard == "grpo-async inspect-rollouts demo --group 5"
        await press(pilot, "enter", "right", "y")
        assert app.clipboard == "5-1"
        await press(pilot, "enter", "Y")
        assert app.clipboard == "grpo-async inspect-rollouts demo --rollout 5-1"

    async def superseded(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "Y")
        assert app.clipboard == "grpo-async inspect-rollouts demo --group 5 --superseded"

    drive(run, scenario)
    drive(run, superseded, with_superseded=True)


def test_superseded_groups_are_shown_when_asked_for(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path / "rollouts")
    append_simple(store, 0, step=1)
    position = store.position()
    append_simple(store, 1, step=2, answer="before")
    store.close()
    again = open_store(tmp_path / "rollouts")
    again.supersede_from(position, step=1)
    append_simple(again, 1, step=2, answer="anew")

    async def current(app: Inspector, pilot: Pilot[None]) -> None:
        assert _groups(app) == [1, 0]
        assert "superseded" in shown(app)  # the note says that there are

    async def everything(app: Inspector, pilot: Pilot[None]) -> None:
        assert _groups(app) == [1, 1, 0]
        await press(pilot, "down", "enter")
        assert "before" in shown(app)

    drive(tmp_path, current)
    drive(tmp_path, everything, with_superseded=True)


def test_a_long_table_reads_only_the_pages_it_shows(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path / "rollouts")
    for group_id in range(300):
        append_simple(store, group_id, step=group_id, rewards=(0.0,))

    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        table = on(app, BrowseScreen).table
        assert table.total == 300
        await press(pilot, "G")
        assert table.cursor == 299
        assert shown(app).splitlines()[-2].split()[1] == "0"  # the oldest group, on the last line of the table
        read = [position for position in range(300) if table.peek(position) is not None]
        assert 100 not in read
        append_simple(store, 300, step=300)
        append_simple(store, 301, step=301)
        app.look()
        await settle(pilot)
        row = await table.row(100)  # pages that are read later fit to those that are there: nothing moves by two
        assert isinstance(row, GroupSummary)
        assert row.group_id == 199
        await press(pilot, "pageup", "k")
        assert table.cursor < 290
        await press(pilot, "g")
        assert shown(app).splitlines()[4].split()[1] == "299"  # below the line that announces

    drive(tmp_path, scenario)


def test_q_and_escape_lead_back_and_out(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "enter", "enter")
        on(app, RolloutScreen)
        await press(pilot, "escape")
        on(app, GroupScreen)
        await press(pilot, "q")
        on(app, BrowseScreen)
        await pilot.press("q")
        await pilot.pause()
        assert not app.is_running or app._exit

    drive(run, scenario)
