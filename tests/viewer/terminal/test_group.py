"""A group side by side: columns, the reference, differences."""

from __future__ import annotations

from pathlib import Path

import pytest
from textual.pilot import Pilot

from grpo_async.records import GroupStatus
from grpo_async.viewer.terminal.app import Inspector
from grpo_async.viewer.terminal.group import (
    GroupScreen,
    best_rollout,
    completion_text,
    marked_text,
)
from grpo_async.viewer.terminal.rollout import RolloutScreen
from tests.store.builders import OpenStore, append, append_simple, build_group, build_rollout, build_sample
from tests.support.stored import read_groups
from tests.viewer.terminal.support import SIZES, drive, on, press, shown


@pytest.fixture
def eight(tmp_path: Path, open_store: OpenStore) -> Path:
    """One group of eight; rollout 5 is the best, and says something else."""
    rollouts = [
        build_rollout(f"0-{i}", text=f"the answer is {'two' if i == 5 else 'three'} line {i}\n" + "and so on\n" * 40)
        for i in range(8)
    ]
    samples = [build_sample(0, each, float(i == 5), 2.0 if i == 5 else -0.3) for i, each in enumerate(rollouts)]
    store = open_store(tmp_path / "rollouts")
    append(store, build_group(0, rollouts, answer="2"), samples, GroupStatus.TRAINED, 7)
    append_simple(store, 1)
    store.flush()
    return tmp_path


@pytest.mark.parametrize(("size", "fit"), [(SIZES[0], 2), (SIZES[1], 3)])
def test_rollouts_stand_side_by_side_with_what_they_got(eight: Path, size: tuple[int, int], fit: int) -> None:
    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "down", "enter")
        page = shown(app)
        lines = page.splitlines()
        assert f"group 0  step 7  prompt 100  trained  0-{fit - 1} of 8 rollouts" in lines[0]
        for part in ("what is 1 + 1?", "answer = 2", "▶0 0-0"):
            assert part in page
        for index in range(fit):
            assert f"{index} 0-{index}" in page
        assert f"{fit} 0-{fit}" not in page
        assert page.count("reward 0.000") == fit
        assert page.count("advantage -0.300") == fit
        assert page.count("exact 0.000") == fit
        assert "3 tokens" in page
        for _ in range(5):
            await press(pilot, "right")
        assert "▶5 0-5 =" in shown(app)  # the best is what the others are compared with
        assert "reward 1.000" in shown(app)
        await press(pilot, "enter")
        assert on(app, RolloutScreen).rollout_id == "0-5"
        await press(pilot, "n")
        assert on(app, RolloutScreen).rollout_id == "0-6"
        await press(pilot, "n", "n")
        assert on(app, RolloutScreen).rollout_id == "0-7"  # it ends there
        await press(pilot, "q")
        assert on(app, GroupScreen).chosen == 7

    drive(eight, scenario, size=size)


def test_words_that_the_reference_does_not_have_are_marked(tmp_path: Path, open_store: OpenStore) -> None:
    store = open_store(tmp_path / "rollouts")
    rollouts = [build_rollout(f"0-{i}", text=text) for i, text in enumerate(("a x c\nd", "a b c\nd", "a b c\nd"))]
    samples = [build_sample(0, each, float(i)) for i, each in enumerate(rollouts)]
    append(store, build_group(0, rollouts), samples, GroupStatus.TRAINED, 1)
    store.flush()
    (row,) = read_groups(tmp_path / "rollouts")
    assert best_rollout(row.rollouts) == 2
    text = marked_text(row.rollouts[0], completion_text(row.rollouts[2]), "MARK")
    assert [text.plain[span.start : span.end].strip() for span in text.spans if span.style == "MARK"] == ["x"]
    assert text.plain == "a x c\nd"
    assert marked_text(row.rollouts[0], None, "MARK").spans == []

    async def scenario(app: Inspector, pilot: Pilot[None]) -> None:
        await press(pilot, "enter")
        assert "marked: not in 2" in shown(app)
        await press(pilot, "equals_sign")
        assert "marked: not in 0" in shown(app)
        await press(pilot, "d")
        assert "marked" not in shown(app)

    drive(tmp_path, scenario)
