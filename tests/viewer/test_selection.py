"""Which groups are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_async.errors import ConfigError
from grpo_async.records import GroupStatus
from grpo_async.store import scan_groups
from grpo_async.viewer.selection import Filters, order, parse_statuses, parse_steps, select
from tests.store.builders import OpenStore, append_simple, build_failed_rollout, build_group


@pytest.fixture
def folder(tmp_path: Path, open_store: OpenStore) -> Path:
    store = open_store(tmp_path)
    append_simple(store, 0, step=1, rewards=(0.0, 0.5), version=0)
    append_simple(store, 1, step=2, rewards=(1.0, 1.0), version=1, num_tokens=9, text="Count SHEEP")
    append_simple(store, 2, step=3, rewards=(0.0, 0.0), status=GroupStatus.STALE, truncated=True, answer="I give up")
    store.append(build_group(3, [build_failed_rollout("3-0")]), [], GroupStatus.FAILED, None)
    return tmp_path


def _ids(folder: Path, filters: Filters) -> list[int]:
    return [summary.group_id for summary in select(scan_groups(folder), filters)[0]]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(), [0, 1, 2, 3]),
        (Filters(steps=(2, 2)), [1]),
        (Filters(steps=(2, None)), [1, 2]),
        (Filters(steps=(0, 2)), [0, 1]),
        (Filters(statuses=frozenset({GroupStatus.STALE, GroupStatus.FAILED})), [2, 3]),
        (Filters(min_reward=0.25), [0, 1]),  # means: 0.25, 1, 0, none
        (Filters(max_reward=0.25), [0, 2]),
        (Filters(min_reward=0.1, max_reward=0.9), [0]),
        (Filters(truncated=True), [2]),
        (Filters(truncated=False), [0, 1, 3]),
        (Filters(search="sheep"), [1]),
        (Filters(search="GIVE up"), [2]),
        (Filters(group_id=2), [2]),
        (Filters(rollout_id="1-1"), [1]),
    ],
)
def test_a_filter_keeps_the_groups_that_satisfy_it(folder: Path, filters: Filters, expected: list[int]) -> None:
    assert _ids(folder, filters) == expected


def test_a_summary_has_the_figures_of_its_group(folder: Path) -> None:
    found, num_read = select(scan_groups(folder), Filters())
    assert num_read == 4
    first, _, third, failed = found
    assert first.prompt == "what is 1 + 1?"
    assert (first.reward_mean, first.reward_min, first.reward_max) == (0.25, 0.0, 0.5)
    assert (first.mean_length, first.versions, first.truncated_share) == (3.0, (0, 0), 0.0)
    assert third.truncated_share == 1.0
    assert (failed.reward_mean, failed.versions, failed.mean_length) == (None, None, 0.0)


def test_the_most_interesting_comes_first(folder: Path) -> None:
    found, _ = select(scan_groups(folder), Filters())
    assert [summary.group_id for summary in order(found, None)] == [3, 2, 1, 0]
    assert [summary.group_id for summary in order(found, "step")] == [2, 1, 0, 3]  # 3 has no step
    assert [summary.group_id for summary in order(found, "reward")] == [1, 0, 2, 3]
    assert [summary.group_id for summary in order(found, "length")] == [1, 2, 0, 3]  # equal lengths: newest first


@pytest.mark.parametrize(
    ("text", "steps"), [("3", (3, 3)), ("3..5", (3, 5)), ("3..", (3, None)), ("..5", (0, 5)), ("..", (0, None))]
)
def test_steps_are_a_number_or_a_range(text: str, steps: tuple[int, int | None]) -> None:
    assert parse_steps(text) == steps


@pytest.mark.parametrize("text", ["x", "1-3", "1..x", "5..3", ""])
def test_other_steps_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--step"):
        parse_steps(text)


def test_an_unknown_status_lists_the_known_ones() -> None:
    assert parse_statuses("trained, stale") == {GroupStatus.TRAINED, GroupStatus.STALE}
    with pytest.raises(ConfigError, match="'traned' is not a status; the statuses are in_flight, queued, trained"):
        parse_statuses("traned")
