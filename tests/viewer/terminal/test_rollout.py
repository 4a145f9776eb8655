"""A rollout turn by turn: the token under the cursor, colors, folds."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.color import Color
from textual.pilot import Pilot
from tokenizers import pre_tokenizers

from grpo_async.records import GroupStatus
from grpo_async.viewer.terminal.app import Inspector
from grpo_async.viewer.terminal.lines import PageView
from grpo_async.viewer.terminal.rollout import RolloutPage, RolloutScreen, token_details, tokens_by_turn, turn_of
from grpo_async.viewer.token_colors import SWATCHES, ColorMode
from grpo_async.viewer.token_text import TokenTexts
from tests.store.builders import (
    OpenStore,
    append,
    build_branched_rollout,
    build_group,
    build_rollout,
    build_sample,
)
from tests.support.stored import read_groups
from tests.viewer.support import byte_tokenizer
from tests.viewer.terminal.support import SIZES, drive, on, press, shown


async def _open(pilot: Pilot[None], app: Inspector) -> RolloutScreen:
    """The rollout with tools: the query leaves its group alone."""
    await press(pilot, "enter", "enter")
    return on(app, RolloutScreen)


@pytest.mark.parametrize("size", SIZES)
def test_turns_tools_and_the_token_under_the_cursor(run: Path, size: tuple[int, int]) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        screen = await _open(pilot, app)
        page = shown(app)
        for expected in (
            "rollout 1-0 (1 of 2)  group 1 trained  step 2  finished  done",
            "reward 1.000  advantage +0.750",
            "user (prompt)",
            "what is 1 + 1?",
            "turn 1 · 2 tokens · stop · 0 s + 0.125 s tools · v2-3",
            "▸ add(",
            "failed 0.125 s",
            "▸ 2 tokens of the answer, not trained on",
            "turn 2 · 1 token",
        ):
            assert expected in page
        # the first token: sampler -0.5 = 60.7 %, trainer -1.0 = 36.8 %; e^-0.5 = 0.6065
        for expected in (
            "token 1 of 5", "id 5", "turn 1", "version 2", "sampler -0.5000 (60.7%)", "trainer -1.0000 (36.8%)",
            "proximal -1.2500 (28.7%)", "log ratio -0.5000", "ratio 0.6065", "weight 1.0000", "entropy 0.5000",
            "advantage +0.750", "flags none: trained on",
        ):  # fmt: skip
            assert expected in page
        await press(pilot, "right")
        assert "token 2 of 5" in shown(app)
        assert "flags clipped low" in shown(app)
        await press(pilot, "right")
        assert "token 5 of 5" in shown(app)  # the tool's tokens are folded
        assert screen.page.cursor == 4
        await press(pilot, "h", "h", "h")
        assert screen.page.cursor == 0

    drive(run, scenario, size=size, text="'add' in tools")


def test_folds_show_arguments_results_and_the_tools_tokens_by_keys_and_clicks(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        screen = await _open(pilot, app)
        assert screen.page.tokens == [0, 1, 4]
        await press(pilot, "t")
        assert screen.page.tokens == [0, 1, 2, 3, 4]
        page = shown(app)
        for expected in (
            "▾ add  failed 0.125 s",
            "a = 1",
            "b = {2}",
            "→ result",
            "\\ud83d",
            "▾ 2 tokens of the answer",
        ):
            assert expected in page
        await press(pilot, "right", "right")
        assert "mask 0: not trained on" in shown(app)
        await press(pilot, "enter")
        assert screen.page.tokens == [0, 1, 4]
        assert screen.page.cursor == 1  # the token before the one that went
        await press(pilot, "T", "T", "left")
        assert screen.page.tokens == [0, 1, 4]
        lines, top = shown(app).splitlines(), screen.page.region.y
        await pilot.click(PageView, offset=(8, next(n for n, line in enumerate(lines) if "▸ add(" in line) - top))
        await pilot.pause()
        assert "▾ add" in shown(app)
        tokens = next(n for n, line in enumerate(shown(app).splitlines()) if "turn 1 " in line) + 2
        await pilot.click(PageView, offset=(6, tokens - top))  # "   5 6": the second token
        assert screen.page.cursor == 1

    drive(run, scenario, size=(140, 45), text="'add' in tools")


def test_c_cycles_the_colors_and_their_legend_and_keeps_them_for_the_next_rollout(run: Path) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        screen = await _open(pilot, app)
        await press(pilot, "right", "right")  # away from the tokens that are looked at

        def background(token: int) -> Color | None:
            return screen.page.token_styles[token].bgcolor

        def swatch(name: str) -> Color:
            return Color.parse(SWATCHES[name][0])

        assert app.session.color_mode is ColorMode.LOG_RATIO
        assert background(0) == swatch("down-2")  # trainer -1.0, sampler -0.5: -0.5
        assert background(2) is None
        seen = []
        for expected in ("entropy", "sampler's probability", "advantage", "policy version", "mask and flags"):
            await press(pilot, "c")
            assert expected in shown(app)
            seen.append(background(0))
            if expected == "advantage":
                assert background(1) == swatch("no-gradient")  # clipped
        # 0.5 nats; e^-0.5 = 61 %; +0.75; version 2; no flag
        assert seen == [swatch("level-2"), swatch("level-1"), swatch("up-2"), swatch("version-2"), swatch("trained")]
        assert background(1) == swatch("clipped-low")
        await press(pilot, "n")
        assert "mask and flags" in shown(app)
        await press(pilot, "c")
        assert any(line.startswith(" log ratio (trainer - sampler)   ≤-0.7") for line in shown(app).splitlines())
        await press(pilot, "C")
        assert "mask and flags" in shown(app)
        await press(pilot, "L")
        assert not app.current_theme.dark

    drive(run, scenario, text="'add' in tools")


def test_token_texts_show_line_ends_and_nothing_that_a_terminal_obeys(tmp_path: Path, open_store: OpenStore) -> None:
    texts = TokenTexts(byte_tokenizer())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = {"h": "h", " ": "Ġ", "\n": "Ċ", "\x1b": "ě", "[": "[", "\t": "ĉ"}
    ids = [alphabet.index(names[character]) for character in "h h\n\x1b[h\th"]
    rollout = build_rollout("0-0", ids=ids)
    store = open_store(tmp_path / "rollouts")
    append(store, build_group(0, [rollout]), [build_sample(0, rollout, 1.0)], GroupStatus.TRAINED, 1)
    store.flush()

    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await _open(pilot, app)
        page = shown(app)
        for part in ("h h⏎\n", "␛[h→   h", "text 'h'"):
            assert part in page
        assert "\x1b" not in page
        await press(pilot, "right", "right", "right")
        assert "text '\\n'" in shown(app)

    drive(tmp_path, scenario, texts=texts)


def test_every_token_is_on_the_unfolded_page_once_in_its_turn_and_details_say_what_is_not_known(run: Path) -> None:
    groups = list(read_groups(run / "rollouts"))
    group, rollout = groups[1], groups[1].rollouts[0]
    places = tokens_by_turn(rollout)
    assert [(place.first, place.answer, place.end) for place in places] == [(0, 2, 4), (4, 5, 5)]
    assert [turn_of(rollout, token) for token in range(6)] == [0, 0, 0, 0, 1, None]
    unfolded = frozenset({"tools-0", "tools-1"})
    lines = list(RolloutPage(group=group, rollout=rollout, texts="no texts", width=40, unfolded=unfolded).lines())
    assert [span.token for line in lines for span in line.spans if span.token >= 0] == [0, 1, 2, 3, 4]
    assert max(len(line.text) for line in lines) <= 40
    # of a rollout that no update used
    details = dict(pair for line in token_details(groups[2].rollouts[0], 0, "no texts") for pair in line)
    assert {details[name] for name in ("trainer", "proximal", "ratio", "weight", "entropy")} == {"-"}
    assert details["flags"].startswith("not recorded")
    assert details["sampler"] == "-0.2500 (77.9%)"


def test_b_goes_through_the_branches_of_an_agent(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path / "rollouts")
    append(store, build_group(7, [build_branched_rollout("g7-r0")]), [], GroupStatus.FILTERED, 1)
    store.flush()

    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "enter", "enter")
        assert "g7-r0.b1 · 1 call · 2 tokens · reward 0.250 · behind 3 tokens" in shown(app)
        await press(pilot, "b")
        assert "rollout g7-r0.b1 (a branch, 1 of 1)" in shown(app)
        assert "ask b1" in shown(app)
        await press(pilot, "b", "b")
        assert "rollout g7-r0 (1 of 1)" in shown(app)

    drive(tmp_path, scenario, size=(140, 45))
