"""A store of 100,000 rollouts (with few tokens, so that it is made in seconds): the first table, filters and pages come at once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import duckdb
import pytest

from grpo_async.store.query import parse_query
from grpo_async.store.schema import SCHEMA
from grpo_async.store.table import RolloutTable
from tests.store.builders import append_simple, seal_all
from tests.support.stored import LineStore

pytestmark = pytest.mark.slow

GROUPS, GROUP_SIZE, COPIES, PER_BLOCK = 100, 8, 125, 25
ROLLOUTS = GROUPS * GROUP_SIZE * COPIES
FIRST_TABLE_S, FILTER_S = 2.0, 1.0
SLACK = 5.0  # the machine of the tests does other things too
FILTERS = (
    "reward<0.2 and truncated",
    "rewards['exact'] < 1",
    "step between 20 and 40 and finished",
    "text ilike '%zyzzyva%'",
    "completion ilike '%so therefore%' and reward>0.5",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The groups of one block, again and again with other ids, steps and texts."""
    made: Path = tmp_path_factory.mktemp("scale") / "rollouts"
    with LineStore(made) as store:
        for group_id in range(GROUPS):
            rewards = [index % 5 / 4 for index in range(GROUP_SIZE)]
            said = f"so therefore {group_id}" if group_id % 2 else f"wait{' zyzzyva' if group_id % 10 == 0 else ''}"
            append_simple(
                store,
                group_id,
                rewards=rewards,
                step=group_id // 5,
                answer=said,
                num_tokens=24,
                truncated=group_id % 3 == 0,
            )
    seal_all(made)
    (source,) = made.glob("*.parquet")
    with duckdb.connect() as connection:
        for first in range(1, COPIES, PER_BLOCK):
            last = min(first + PER_BLOCK, COPIES)
            target = made / f"block-{first * GROUPS:012d}-{last * GROUPS - 1:012d}.parquet"
            connection.execute(
                f"COPY (SELECT * REPLACE (seq + k * {GROUPS} AS seq, group_id + k * {GROUPS} AS group_id, step + k * 20 AS step, "
                f"'c' || k || rollout_id AS rollout_id, completion_text || ' ' || hash(seq, rollout_index, k) AS completion_text) "
                f"FROM read_parquet('{source}'), range({first}, {last}) AS copies(k) ORDER BY seq, rollout_index) "
                f"TO '{target}' (FORMAT parquet, COMPRESSION zstd, KV_METADATA {{grpo_async_schema: '{SCHEMA}'}})"
            )
    return made


@pytest.fixture(scope="module")
def table(folder: Path) -> Iterator[RolloutTable]:
    with RolloutTable(folder) as opened:
        yield opened


def _seconds(ask: Callable[[], Any]) -> float:
    start = time.perf_counter()
    ask()
    return time.perf_counter() - start


def test_the_first_table_of_a_large_run_is_there_at_once(folder: Path) -> None:
    def first_table() -> None:
        with RolloutTable(folder) as opened:
            assert opened.count().rollouts == ROLLOUTS
            assert len(opened.group_page(limit=40)) == len(opened.page(limit=40)) == 40
            assert opened.group_at(GROUPS * COPIES - 1).group_id == GROUPS * COPIES - 1

    assert _seconds(first_table) < FIRST_TABLE_S * SLACK


@pytest.mark.parametrize("text", FILTERS)
def test_a_filter_of_a_large_run_is_there_at_once(table: RolloutTable, text: str) -> None:
    query = parse_query(text)
    assert _seconds(lambda: (table.count(query), table.page(query, limit=40))) < FILTER_S * SLACK
    assert 0 < table.count(query).rollouts < ROLLOUTS
