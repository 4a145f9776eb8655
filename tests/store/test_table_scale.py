"""A store of 100,000 rollouts (with few tokens, so that it is made in seconds): the first table, filters and pages come at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from grpo_async.store.query import parse_query
from grpo_async.store.table import RolloutTable
from tests.store.large_store import make_store

pytestmark = pytest.mark.slow

ROLLOUTS = 100_000
FIRST_TABLE_S, FILTER_S = 2.0, 1.0
SLACK = 5.0  # the machine of the tests does other things too
FILTERS = (
    "reward<0.2 and truncated",
    "'python' in tools and failed",
    "rewards['format'] < 1",
    "step between 100 and 120 and not finished",
    "group_std=0",
    "staleness>=2 or clipped_share>0.1",
    "columns['answer'] = '9'",
    "text ilike '%zyzzyva%'",
    "completion ilike '%so therefore%' and reward>0.5",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made: Path = tmp_path_factory.mktemp("scale") / "rollouts"
    make_store(made, rollouts=ROLLOUTS, tokens=24)
    return made


@pytest.fixture(scope="module")
def table(folder: Path) -> Iterator[RolloutTable]:
    with RolloutTable.open(folder) as opened:
        yield opened


def _seconds(ask: Callable[[], Any]) -> float:
    start = time.perf_counter()
    ask()
    return time.perf_counter() - start


def test_the_first_table_of_a_large_run_is_there_at_once(folder: Path) -> None:
    def first_table() -> None:
        with RolloutTable.open(folder) as opened:
            assert opened.count().rollouts == ROLLOUTS
            assert len(opened.group_page(limit=40)) == len(opened.page(limit=40)) == 40

    assert _seconds(first_table) < FIRST_TABLE_S * SLACK


@pytest.mark.parametrize("text", FILTERS)
def test_a_filter_of_a_large_run_is_there_at_once(table: RolloutTable, text: str) -> None:
    query = parse_query(text)
    assert _seconds(lambda: (table.count(query), table.page(query, limit=40))) < FILTER_S * SLACK
    assert 0 < table.count(query).rollouts < ROLLOUTS


def test_pages_of_a_large_run_are_whole_and_disjoint(table: RolloutTable) -> None:
    query = parse_query("text like '%zyzzyva%'")
    number = table.count(query).rollouts
    found = [
        each for start in range(0, number, 200) for each in table.page(query, sort="reward", offset=start, limit=200)
    ]
    assert len({each.rollout_id for each in found}) == len(found) == number
    rewards = [each.reward for each in found if each.reward is not None]
    assert rewards == sorted(rewards)
    assert number == table.count(parse_query("completion like '%zyzzyva%'")).rollouts
    assert table.count(parse_query("")).rollouts == ROLLOUTS


def test_the_same_seed_makes_the_same_store(folder: Path, tmp_path: Path) -> None:
    make_store(tmp_path / "small", rollouts=400, tokens=24)
    make_store(tmp_path / "again", rollouts=400, tokens=24)
    make_store(tmp_path / "other", rollouts=400, tokens=24, seed=1)

    def rewards(name: str) -> list[float | None]:
        with RolloutTable.open(tmp_path / name) as table:
            return [each.reward for each in table.page(sort="seq,index", limit=300)]

    assert rewards("small") == rewards("again") != rewards("other")
