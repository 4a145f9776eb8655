"""The arguments of `inspect-rollouts`: runs, evaluations, and the options that are short for a query."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from grpo_async.viewer.short_forms import query_text, sort_order

from grpo_async.errors import ConfigError
from grpo_async.run_directory import RunDir
from grpo_async.store.query import parse_query
from grpo_async.viewer.runs import find_evaluation, find_run


def test_a_run_is_found_by_name_and_by_path_and_an_unknown_one_lists_the_nearest(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    with pytest.raises(ConfigError, match=r"there is no run 'a', and .*runs holds none"):
        find_run("a", runs)
    for name in ("quickstart", "other"):
        (runs / name).mkdir(parents=True)
    assert find_run("other", runs).root == runs / "other"
    assert find_run(str(runs / "other"), tmp_path / "elsewhere").root == runs / "other"
    with pytest.raises(ConfigError, match="there is no run 'quickstrat'; did you mean 'quickstart'"):
        find_run("quickstrat", runs)
    with pytest.raises(ConfigError, match=r"there is no run 'zzz'; .*runs holds (quickstart, other|other, quickstart)"):
        find_run("zzz", runs)
    for nothing in ("", ".", ".."):
        with pytest.raises(ConfigError, match="there is no run"):
            find_run(nothing, runs)


def test_an_evaluation_is_found_by_its_step_or_as_the_last_one(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    for name in ("step_5", "step_40", "step_x", "other"):
        (run.evaluations / name).mkdir(parents=True)
    assert find_evaluation(run, "5").rollouts == run.evaluations / "step_5"
    last = find_evaluation(run, "last")
    assert last.rollouts == run.evaluations / "step_40"
    assert last.config == run.config  # where the tokenizer is named
    for wrong in ("6", "x", "-1"):
        with pytest.raises(ConfigError, match=f"--evaluation {wrong}: .* it has: 5, 40"):
            find_evaluation(run, wrong)
    with pytest.raises(ConfigError, match="it has: none"):
        find_evaluation(RunDir(tmp_path / "other"), "last")


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, ""),
        ({"query": "reward<1 or stale"}, "reward<1 or stale"),
        ({"query": "reward<1 or stale", "step": "3"}, "(reward<1 or stale) and step=3"),
        ({"step": "3..5"}, "step BETWEEN 3 AND 5"),
        ({"step": "3.."}, "step>=3"),
        ({"step": "..5"}, "step<=5"),
        ({"step": "last"}, "step=last"),
        ({"status": "trained, stale"}, "group_status IN ('trained', 'stale')"),
        ({"min_reward": 0.25, "max_reward": -1e-05}, "group_reward>=0.25 and group_reward<=-1e-05"),
        ({"truncated": True}, "group_truncated>0"),
        ({"truncated": False}, "group_truncated=0"),
        ({"search": 'say "hi" \\ now'}, "contains(lower(text), 'say \"hi\" \\ now')"),
    ],
)
def test_options_become_a_query_that_can_be_read(options: dict[str, Any], expected: str) -> None:
    assert query_text(**options) == expected
    parse_query(expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": "x"}, r"--step x: write a step \(12\)"),
        ({"step": ".."}, r"--step \.\.: write a step"),
        ({"step": "5..3"}, "the range ends before it begins"),
        ({"status": "trained,odd"}, "'odd' is not a status; the statuses are trained, filtered, stale"),
    ],
)
def test_mistakes_name_the_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        query_text(**options)


def test_orders_begin_with_the_highest() -> None:
    orders = {
        None: "",
        "reward": "-reward",
        "-reward": "-reward",
        "reward:asc": "reward",
        "step, length:asc": "-step,length",
    }
    assert {text: sort_order(text) for text in orders} == orders
    for wrong in ("reward:up", ":asc", "a,,b"):
        with pytest.raises(ConfigError, match="--sort"):
            sort_order(wrong)
