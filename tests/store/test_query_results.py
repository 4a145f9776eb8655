"""What queries find in a store that a real writer made: every field, operator and word, against Python's own comparison."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_async.records import GroupStatus, ScoredGroup, TokenFigures
from grpo_async.store import RolloutStore
from grpo_async.store.query import QueryError, parse_query
from grpo_async.store.query_fields import FIELDS, WORDS, Kind, Place
from grpo_async.store.summaries import GroupSummary, RolloutSummary
from grpo_async.store.table import RolloutTable
from tests.store.builders import (
    build_failed_rollout,
    build_figures,
    build_group,
    build_rollout,
    build_sample,
    build_tool_rollout,
)

_ORDERS: dict[str, Callable[[float, float], bool]] = {"<": operator.lt, ">=": operator.ge, "=": operator.eq}


def _fill(store: RolloutStore) -> None:
    """Seven groups: trained with figures, filtered, stale, failed, cancelled, trained in a later step, failed without a rollout."""
    first = [build_rollout("a0", text="Paris is it", ids=range(3)), build_rollout("a1", truncated=True, version=1)]
    samples = [build_sample(1, first[0], 1.0, 0.7), build_sample(1, first[1], 0.0, -0.7)]
    figures = {"a0": build_figures(3), "a1": _plain_figures(3)}
    store.append(build_group(1, first, answer=9, level="007"), samples, GroupStatus.TRAINED, 3, figures=figures)
    tools = [build_tool_rollout("b0"), build_failed_rollout("b1", "a timeout of 5 s")]
    scored = ScoredGroup(
        group=build_group(2, tools), samples=[], rewards=[0.5], reward_parts=[{"exact": 0.5, "odd name": 2.0}],
        extra_columns={"parsed": ["x"]},
    )  # fmt: skip
    store.append(scored.group, [], GroupStatus.FILTERED, 3, scored=scored)
    stale = [build_rollout("c0", text="100% sure_ly", ids=range(40), version=2)]
    store.append(build_group(3, stale, text="say 'hi'\nÄPFEL"), [build_sample(3, stale[0], 0.25)], GroupStatus.STALE, 6)
    store.append(build_group(4, [build_failed_rollout("d0")]), [], GroupStatus.FAILED, None)
    store.append(build_group(5, []), [], GroupStatus.CANCELLED, None)
    later = [build_rollout("e0", ids=range(7), version=5), build_rollout("e1", ids=range(9), version=4)]
    samples = [build_sample(6, each, reward, 0.1) for each, reward in zip(later, (0.75, 1.0), strict=True)]
    store.append(build_group(6, later, answer=10), samples, GroupStatus.TRAINED, 7)
    store.append(build_group(7, []), [], GroupStatus.FAILED, None)


def _plain_figures(number: int) -> TokenFigures:
    """On policy: nothing clipped or masked."""
    zeros = [0.0] * number
    return TokenFigures(
        logprobs=[-0.5] * number,
        proximal_logprobs=[-0.5] * number,
        weights=[1.0] * number,
        entropies=zeros,
        marks=[0] * number,
    )


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RolloutTable]:
    folder = tmp_path_factory.mktemp("queries") / "rollouts"
    with RolloutStore(folder, seals_at_close=False) as store:
        _fill(store)
    with RolloutTable.open(folder) as opened:
        yield opened


def _ids(table: RolloutTable, text: str) -> set[str]:
    return {each.rollout_id for each in table.page(parse_query(text), limit=100)}


def _groups(table: RolloutTable, text: str) -> set[int]:
    return {each.group_id for each in table.group_page(parse_query(text), limit=100)}


EVERY = {"a0", "a1", "b0", "b1", "c0", "d0", "e0", "e1"}

_ROLLOUT_VALUES: dict[str, Callable[[RolloutSummary], Any]] = {
    "reward": lambda r: r.reward,
    "advantage": lambda r: r.advantage,
    "step": lambda r: r.step,
    "length": lambda r: r.num_tokens,
    "completion_length": lambda r: r.num_completion_tokens,
    "prompt_length": lambda r: r.num_prompt_tokens,
    "turns": lambda r: r.num_turns,
    "tool_calls": lambda r: r.num_tool_calls,
    "failed_tool_calls": lambda r: r.num_failed_tool_calls,
    "staleness": lambda r: r.staleness,
    "version_min": lambda r: r.version_min,
    "version_max": lambda r: r.version_max,
    "entropy": lambda r: r.entropy_mean,
    "ratio": lambda r: r.ratio_mean,
    "ratio_min": lambda r: r.ratio_min,
    "ratio_max": lambda r: r.ratio_max,
    "clipped_share": lambda r: r.clipped_share,
    "masked_share": lambda r: r.masked_share,
    "mismatch": lambda r: r.mismatch_mean,
    "logprob": lambda r: r.logprob_mean,
    "logprob_min": lambda r: r.logprob_min,
    "duration": lambda r: r.total_duration_s,
    "generation_duration": lambda r: r.generation_duration_s,
    "tool_duration": lambda r: r.tool_duration_s,
    "started_at": lambda r: r.started_at,
    "written_at": lambda r: r.written_at,
    "index": lambda r: r.rollout_index,
    "seq": lambda r: r.seq,
    "prompt_id": lambda r: r.prompt_id,
    "reward.NAME": lambda r: r.rewards.get("exact"),
}
_GROUP_VALUES: dict[str, Callable[[GroupSummary], Any]] = {
    "group.id": lambda g: g.group_id,
    "group.size": lambda g: g.size,
    "group.reward": lambda g: g.reward_mean,
    "group.std": lambda g: g.reward_std,
    "group.min": lambda g: g.reward_min,
    "group.max": lambda g: g.reward_max,
    "group.scored": lambda g: g.num_scored,
    "group.length": lambda g: g.num_tokens_mean,
    "group.truncated": lambda g: g.num_truncated / g.size if g.size else None,
    "group.failed": lambda g: g.num_failed / g.size if g.size else None,
    "group.turns": lambda g: g.num_turns_mean,
    "group.tool_calls": lambda g: g.num_tool_calls,
    "group.failed_tool_calls": lambda g: g.num_failed_tool_calls,
    "group.staleness": lambda g: g.staleness,
    "group.entropy": lambda g: g.entropy_mean,
    "group.ratio_max": lambda g: g.ratio_max,
    "group.clipped_share": lambda g: g.clipped_share,
    "group.masked_share": lambda g: g.masked_share,
    "group.mismatch": lambda g: g.mismatch_mean,
    "group.duration": lambda g: g.total_duration_s,
    "group.step": lambda g: g.step,
    "group.seq": lambda g: g.seq,
    "group.prompt_id": lambda g: g.prompt_id,
    "group.written_at": lambda g: g.written_at,
    "group.version_min": lambda g: g.version_min,
}


def test_every_number_of_the_language_is_tried_below() -> None:
    numbers = {field.name for field in FIELDS if field.kind is Kind.NUMBER and field.place is Place.INDEX}
    assert numbers == _ROLLOUT_VALUES.keys() | _GROUP_VALUES.keys()


@pytest.mark.parametrize("name", _ROLLOUT_VALUES)
def test_a_number_of_a_rollout_compares_as_in_python(table: RolloutTable, name: str) -> None:
    value = _ROLLOUT_VALUES[name]
    _compare(name, table.page(limit=100), value, lambda text: table.page(parse_query(text), limit=100))


@pytest.mark.parametrize("name", _GROUP_VALUES)
def test_a_number_of_a_group_compares_as_in_python(table: RolloutTable, name: str) -> None:
    value = _GROUP_VALUES[name]
    _compare(name, table.group_page(limit=100), value, lambda text: table.group_page(parse_query(text), limit=100))


def _compare(name: str, rows: list[Any], value: Callable[[Any], Any], find: Callable[[str], list[Any]]) -> None:
    known = sorted({value(row) for row in rows if value(row) is not None})
    bound = known[len(known) // 2] if known else 1.0
    shown = name.replace("NAME", "exact")
    for sign, compare in _ORDERS.items():
        expected = {
            row.seq * 100 + getattr(row, "rollout_index", 0)
            for row in rows
            if value(row) is not None and compare(value(row), bound)
        }
        text = f"{shown}{sign}{bound!r}"
        assert {row.seq * 100 + getattr(row, "rollout_index", 0) for row in find(text)} == expected, text
        assert len(find(f"not {text}")) == len(rows) - len(expected), text
    missing = [row for row in rows if value(row) is None]
    assert len(find(f"{shown}=none")) == len(missing)
    assert len(find(f"{shown}!={bound!r}")) == len([row for row in rows if value(row) != bound])
    assert len(find(f"{shown} in {bound!r}..")) == len([r for r in rows if value(r) is not None and value(r) >= bound])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("status=finished", {"a0", "b0", "c0", "e0", "e1"}),
        ("status=Truncated,failed", {"a1", "b1", "d0"}),
        ("status!=finished", {"a1", "b1", "d0"}),
        ("status~fin", {"a0", "b0", "c0", "e0", "e1"}),
        ("id=a0", {"a0"}),
        ("id~A", {"a0", "a1"}),
        ("id in (a0, b1, nobody)", {"a0", "b1"}),
        ("tool=add", {"b0"}),
        ("tool=ADD", set()),
        ("tool~AD", {"b0"}),
        ("tool!=add", EVERY - {"b0"}),
        ("tool!~ad", EVERY - {"b0"}),
        ("tool=none", EVERY - {"b0"}),
        ("tool=add,sub", {"b0"}),
        ("error~TIMEOUT", {"b1"}),
        ("error=none", EVERY - {"b1", "d0"}),
        ("error!=none", {"b1", "d0"}),
        ("error!~timeout", EVERY - {"b1"}),
        ("group.status=trained,stale", {"a0", "a1", "c0", "e0", "e1"}),
        ("group.status!=trained", {"b0", "b1", "c0", "d0"}),
        ('reward."odd name">1', {"b0"}),
        ('"what is"', EVERY - {"c0"}),
        ('"PARIS"', {"a0"}),
        ("text~paris", {"a0"}),
        ("text!~paris", EVERY - {"a0"}),
        ("prompt~be", EVERY),
        ("prompt~äpfel", {"c0"}),
        ("prompt~\"say 'hi'\"", {"c0"}),
        ('completion="Paris is it"', {"a0"}),
        ("completion~three", {"b0"}),
        ('completion~"0% sure_"', {"c0"}),
        ('completion~"%"', {"c0"}),  # no wildcard
        ('completion~"_"', {"c0"}),
        ("call~add", {"b0"}),
        ('call~"failed"', {"b0"}),
        ("columns.answer=9", {"a0", "a1"}),
        ("columns.answer=9.0", {"a0", "a1"}),
        ("columns.answer!=9", EVERY - {"a0", "a1"}),
        ("columns.answer>=9", {"a0", "a1", "e0", "e1"}),
        ("columns.answer in 10..20", {"e0", "e1"}),
        ("columns.answer=none", EVERY - {"a0", "a1", "e0", "e1"}),
        ("columns.level=007", {"a0", "a1"}),
        ("columns.level~00", {"a0", "a1"}),
        ('columns."no such"=1', set()),
        ("extra.parsed=x", {"b0"}),
        ("extra.parsed=none", EVERY - {"b0"}),
        ("step=last", {"e0", "e1"}),
        ("step<last and step!=none", {"a0", "a1", "b0", "b1", "c0"}),
        ("not reward<1", {"a0", "b1", "d0", "e1"}),  # what has no reward is not below 1
        ("reward<1", {"a1", "b0", "c0", "e0"}),
        ("reward!=1", {"a1", "b0", "b1", "c0", "d0", "e0"}),
        ("length<=3", {"a0", "a1", "b0", "b1", "d0"}),
        ("length>3", {"c0", "e0", "e1"}),
        ("length=3..9", {"a0", "a1", "b0", "e0", "e1"}),
        ("length=..3", {"a0", "a1", "b0", "b1", "d0"}),
        ("reward=none,1", {"a0", "b1", "d0", "e1"}),
        ("reward<0.2 and truncated or id=d0", {"a1", "d0"}),
        ("id=d0 or reward<0.2 and truncated", {"a1", "d0"}),
        ("(id=d0 or reward<0.2) and truncated", {"a1"}),
        ('"paris" and reward=1', {"a0"}),
        ('not "what is" or id=a0', {"c0", "a0"}),
    ],
)  # fmt: skip
def test_what_a_query_finds(table: RolloutTable, text: str, expected: set[str]) -> None:
    assert _ids(table, text) == expected
    assert table.count(parse_query(text)).rollouts == len(expected)
    assert _ids(table, f"not ({text})") == EVERY - expected


WORD_RESULTS = {
    "truncated": {"a1"},
    "finished": {"a0", "b0", "c0", "e0", "e1"},
    "done": {"b0"},
    "failed": {"b0", "b1", "d0"},  # b0: a call of its tool failed
    "trained": {"a0", "a1", "e0", "e1"},
    "filtered": {"b0", "b1"},
    "stale": {"c0"},
    "cancelled": set(),
    "scored": {"a0", "a1", "b0", "c0", "e0", "e1"},
    "unscored": {"b1", "d0"},
    "clipped": {"a0"},
    "masked": set(),
    "superseded": set(),
}


@pytest.mark.parametrize("word", [word.name for word in WORDS])
def test_what_a_word_finds(table: RolloutTable, word: str) -> None:
    assert _ids(table, word) == WORD_RESULTS[word]
    assert _ids(table, f"not {word}") == EVERY - WORD_RESULTS[word]


def test_groups_without_a_rollout_are_found_as_groups(table: RolloutTable) -> None:
    assert _groups(table, "") == {1, 2, 3, 4, 5, 6, 7}
    assert _groups(table, "cancelled") == {5}
    assert _groups(table, "failed") == {2, 4, 7}
    assert _groups(table, "group.size=0") == {5, 7}
    assert _groups(table, '"what is"') == {1, 2, 4, 5, 6, 7}
    counts = table.count(parse_query(""))
    assert (counts.rollouts, counts.groups) == (8, 7)


@pytest.mark.parametrize(
    "text",
    [
        'id="x\'; DROP TABLE rows; --"',
        'prompt~"\' OR 1=1 --"',
        'columns."a\') FROM rows; DROP TABLE rows; --"=1',
        'columns."$[*]"=1',
        'columns."a\\"].b[\\""=1',
        'tool~"\'); DELETE FROM rows; --"',
        'extra."?"=1',
    ],
)
def test_hostile_text_stays_text(table: RolloutTable, text: str) -> None:
    assert _ids(table, text) == set()
    assert _ids(table, "") == EVERY  # the tables are as they were


def test_a_reward_that_no_rollout_has_is_a_mistake(table: RolloutTable) -> None:
    with pytest.raises(QueryError) as caught:
        table.count(parse_query("truncated and reward.exat<1"))
    assert caught.value.problem.startswith("no rollout has a reward exat; there are exact, format, odd name")
    assert caught.value.suggestions == ("reward.exact",)
    assert caught.value.position == len("truncated and ")
