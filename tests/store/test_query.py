"""Queries: what SQL conditions find in a store that a real writer made, and what is said about mistakes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import duckdb
import pytest

from grpo_async.errors import GrpoAsyncError
from grpo_async.records import GroupStatus, ScoredGroup
from grpo_async.store import RolloutStore
from grpo_async.store.database import time_limit
from grpo_async.store.names import HELP, NAMES
from grpo_async.store.query import Query, QueryError, parse_query
from grpo_async.store.table import RolloutTable
from tests.store.builders import (
    append,
    build_failed_rollout,
    build_group,
    build_rollout,
    build_sample,
    build_stats,
    build_tool_rollout,
)
from tests.support.stored import LineStore


def _fill(store: RolloutStore) -> None:
    """Seven groups: trained with stats, filtered, stale, failed, cancelled, trained in a later step, failed without a rollout."""
    first = [build_rollout("a0", text="Paris is it", ids=range(3)), build_rollout("a1", truncated=True, version=1)]
    samples = [build_sample(1, first[0], 1.0, 0.7), build_sample(1, first[1], 0.0, -0.7)]
    on_policy = replace(build_stats(3), weights=[1.0] * 3, entropies=[0.0] * 3, flags=[0] * 3)
    stats = {"a0": build_stats(3), "a1": on_policy}
    append(store, build_group(1, first, answer=9, level="007"), samples, GroupStatus.TRAINED, 3, stats=stats)
    tools = [build_tool_rollout("b0"), build_failed_rollout("b1", "a timeout of 5 s")]
    scored = ScoredGroup(
        group=build_group(2, tools), samples=[], rewards=[0.5], reward_parts=[{"exact": 0.5, "odd name": 2.0}],
        extra_columns={"parsed": ["x"]},
    )  # fmt: skip
    append(store, scored.group, [], GroupStatus.FILTERED, 3, scored=scored)
    stale = [build_rollout("c0", text="100% sure_ly", ids=range(40), version=2)]
    append(
        store,
        build_group(3, stale, text="say 'hi'\nÄPFEL", answer="nine"),
        [build_sample(3, stale[0], 0.25)],
        GroupStatus.STALE,
        6,
    )
    append(store, build_group(4, [build_failed_rollout("d0")]), [], GroupStatus.FAILED, None)
    append(store, build_group(5, []), [], GroupStatus.CANCELLED, None)
    later = [build_rollout("e0", ids=range(7), version=5), build_rollout("e1", ids=range(9), version=4)]
    samples = [build_sample(6, each, reward, 0.1) for each, reward in zip(later, (0.75, 1.0), strict=True)]
    append(store, build_group(6, later, answer=10), samples, GroupStatus.TRAINED, 7)
    append(store, build_group(7, []), [], GroupStatus.FAILED, None)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutTable]:
    folder = tmp_path_factory.mktemp("queries") / "rollouts"
    with LineStore(folder) as store:
        _fill(store)
    with RolloutTable(folder) as opened:
        yield opened


def _ids(table: RolloutTable, text: str) -> set[str]:
    return {each["rollout_id"] for each in table.page(parse_query(text), limit=100)}


EVERY = {"a0", "a1", "b0", "b1", "c0", "d0", "e0", "e1"}


def _mistake(text: str) -> QueryError:
    with pytest.raises(QueryError) as caught:
        parse_query(text)
    return caught.value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", EVERY),
        ("reward < 1", {"a1", "b0", "c0", "e0"}),  # a missing reward is not below 1 ...
        ("not reward < 1", {"a0", "e1"}),  # ... nor not below it
        ("reward is null", {"b1", "d0"}),
        ("reward<0.2 and truncated or id='d0'", {"a1", "d0"}),
        ("failed", {"b0", "b1", "d0"}),  # b0: a call of its tool failed
        ("clipped", {"a0"}),
        ("'add' in tools", {"b0"}),
        ("rewards['odd name'] > 1", {"b0"}),
        ("columns['answer'] = '9'", {"a0", "a1"}),
        ("extra['parsed'] = 'x'", {"b0"}),
        ("text ilike '%PARIS%'", {"a0"}),
        ("prompt ilike '%äpfel%'", {"c0"}),
        ("contains(calls, 'failed')", {"b0"}),
        ("step = last_step()", {"e0", "e1"}),
        ("try_cast(columns['answer'] as double) between 9.5 and 11", {"e0", "e1"}),  # others have no such number, or a text
        ("step<last", {"a0", "a1", "b0", "b1", "c0"}),
        ("num_tokens = length and rollout_id = 'e0'", {"e0"}),  # the store's own names
    ],
)  # fmt: skip
def test_what_a_query_finds(table: RolloutTable, text: str, expected: set[str]) -> None:
    assert _ids(table, text) == expected
    assert table.count(parse_query(text)).rollouts == len(expected)


def test_groups_without_a_rollout_are_found_as_groups(table: RolloutTable) -> None:
    for text, expected in {"": {1, 2, 3, 4, 5, 6, 7}, "failed": {2, 4, 7}, "id is null": {5, 7}}.items():
        assert {each["group_id"] for each in table.group_page(parse_query(text), limit=100)} == expected, text


@pytest.mark.parametrize("name", [each.name for each in NAMES])
def test_every_column_can_be_asked_for_and_sorted_by(table: RolloutTable, name: str) -> None:
    known, missing = (len(_ids(table, f"{name} IS {what}")) for what in ("NOT NULL", "NULL"))
    assert known + missing == len(EVERY)
    assert len(table.page(sort=f"-{name}", limit=100)) == len(EVERY)


@pytest.mark.parametrize(
    "text",
    [
        "1) union select 1 from rollouts where (true",
        "true) or (true",
        "true); drop table unsealed; --",
        "true; drop table unsealed",
        "copy unsealed to '/tmp/x'",
        "attach '/tmp/x.db'",
        "install httpfs",
        "pragma database_list",
        "set threads = 1",
        "(" * 1999,
        "no_variable_of_python.x > 1",
        "exists (from EVERY)",
        "a" * 100_000,
        "id = '\ud83d'",
    ],
)
def test_a_query_is_one_condition_over_rollouts(table: RolloutTable, text: str) -> None:
    error = _mistake(text)
    str(error).encode()
    assert len(str(error).splitlines()) == 2
    assert _ids(table, "") == EVERY  # the tables are as they were


@pytest.mark.parametrize(
    "reader",
    [
        "from read_text('{}')",
        "from read_blob('/proc/self/environ')",
        "from read_csv('{}')",
        "from read_json('{}')",
        "from read_parquet('{}')",
        "from parquet_metadata('{}')",
        "from sniff_csv('{}')",
        "from glob('{}')",
        "from glob('/etc/*')",
        "from read_text('/etc/*')",
        "from read_text('{}/../{}')",
        "from '{}'",
        "from read_csv('http://127.0.0.1:1/x')",
        "from query('from read_text(''{}'')')",
    ],
)
def test_no_file_but_those_of_the_store_can_be_read_by_a_query(
    table: RolloutTable, tmp_path: Path, reader: str
) -> None:
    """Whatever the parser lets through, in the database that checks queries and in the one that runs them."""
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret\n")
    text = f"exists ({reader.replace('{}/', f'{table.folder}/').replace('{}', str(secret))})"
    for ask in (lambda: table.count(parse_query(text)), lambda: table.count(Query(text))):
        with pytest.raises(GrpoAsyncError) as caught:
            ask()
        assert "the secret" not in str(caught.value)
        assert re.search("disabled by config|does not exist|[Pp]ermission", str(caught.value)), caught.value


def test_a_query_changes_no_setting_reads_no_secret_and_writes_nothing(table: RolloutTable) -> None:
    """Statements do not get through `parse_query`; the database refuses them too."""
    with table.cursor() as cursor:
        for statement in (
            "SET enable_external_access = true",
            "SET memory_limit = '1TB'",
            "RESET lock_configuration",
            "COPY (SELECT 1) TO '/tmp/grpo-async-query.csv'",
            "ATTACH '/tmp/grpo-async-query.db'",
            "EXPORT DATABASE '/tmp/grpo-async-query'",
            "INSTALL httpfs",
            "LOAD httpfs",
            "CREATE PERSISTENT SECRET s (TYPE http)",
        ):
            with pytest.raises(duckdb.Error):
                cursor.execute(statement)
        assert cursor.execute("FROM duckdb_secrets()").fetchall() == []
    assert not list(Path("/tmp").glob("grpo-async-query*"))


@pytest.mark.parametrize(("seconds", "number"), [(0.5, 1_000_000), (0.0, 100_000)], ids=["later", "at once"])
def test_a_query_that_takes_too_long_is_interrupted(table: RolloutTable, seconds: float, number: int) -> None:
    endless = Query(f"(SELECT sum(a.i * b.i) FROM range({number}) a(i), range({number}) b(i)) < 0")
    with pytest.raises(TimeoutError), time_limit(seconds):
        table.count(endless)
    assert table.count().rollouts == len(EVERY)


def test_what_the_values_of_a_store_do_not_allow_is_an_error_of_the_query(table: RolloutTable) -> None:
    with pytest.raises(QueryError, match="to INT32"):
        table.count(parse_query("id::INTEGER = 3"))


@pytest.mark.parametrize(("text", "remedy"), [("reward", "needs a comparison"), ("'\x1b[2J' = rewrad", "reward")])
def test_a_mistake_is_said_with_a_remedy_and_the_query(text: str, remedy: str) -> None:
    error = _mistake(text)
    assert remedy in error.problem
    assert str(error).splitlines()[1] == f"  in the query: {text}".replace("\x1b", "␛")


@pytest.mark.parametrize("text", ["id = 'x' or true -- (", "id = 'x' or true"])
def test_what_follows_a_query_is_no_part_of_it(table: RolloutTable, text: str) -> None:
    assert {each["rollout_id"] for each in table.page(Query(f"{parse_query(text).sql} and stale"))} == {"c0"}


def test_the_help_has_every_column_and_only_examples_that_can_be_run(table: RolloutTable) -> None:
    (_, examples), *columns = HELP
    assert {each.name for each in NAMES} == {name for _, rows in columns for name, _ in rows}
    for example in (*(text for text, _ in examples), *(each.example for each in NAMES if each.example)):
        table.count(parse_query(example))
